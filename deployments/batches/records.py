"""The tokens of every sample in flight: the results of its chunks, in order, and the replica of each.

Invariant (law 1): a chunk is written once, at the position its `StartChunk` named; tokens only grow. The core counts
tokens, these records hold them. Called by the coordinator alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise

import numpy as np

from tailrace.deployments.batches.answer_text import text_of
from tailrace.deployments.batches.prompts import Prepared, Prompts
from tailrace.deployments.context.history import Answer
from tailrace.deployments.features.prompt_features import PromptFeatures
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.chunk import ChunkResult, SampleKey
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftReport, by_source
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, SampleResult, Segment, Timings
from tailrace.deployments.messages.status import SampleDetail
from tailrace.deployments.results.columns import Column
from tailrace.deployments.results.later_text import TextRule
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.policies.protocol.actions import SampleEnd
from tailrace.policies.protocol.events import Begun, ChunkEnd

COLUMNS = {"token_ids": np.int32, "logprobs": np.float32, "raw_logprobs": np.float32}

SHOWN_TOKENS = 2_000
"""Maximum number of tokens of a sample that are shown as text: their decoding takes some ms of the coordinator's
loop.
"""


@dataclass(slots=True)
class SampleRecord:
    """One sample so far, or its present turn. `parts`: results of the turn's chunks in order. `tokens`: number of
    tokens generated in all turns. `earlier_tokens`: those generated before the present turn.
    """

    group: "GroupRecord"
    index: int
    key: SampleKey
    forced: np.ndarray | None
    asked_s: float = 0.0  # by the coordinator's clock; its other times are relative to it
    parts: list[ChunkResult] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    tokens: int = 0
    earlier_tokens: int = 0
    outside_tokens: int = 0  # context tokens that came between its turns
    turn_prompt: np.ndarray | None = None  # int32, the whole context of a later turn, or None in the first
    turn_features: PromptFeatures | None = None  # features of that context
    max_tokens: int | None = None  # maximum over all turns, or None if it is the group's
    hold_s: float = 0.0  # seconds for which the sample is held for a next turn
    routed: int = 0  # number of tokens whose routed experts are known, over all turns
    logged: int = 0  # number of tokens in the token log, which alone writes it
    kv_names: bytes = b""  # names of the context's blocks that a replica has reported, see kvpool.keys
    started_s: float | None = None
    finished_s: float = 0.0
    end: SampleEnd | None = None
    error: str | None = None
    grown: Callable[[], None] | None = None  # called when tokens are added
    is_counted: bool = False  # whether `count_updates` was called
    columns: dict[str, Column] = field(default_factory=dict)  # columns of all parts, once it has ended; see `join`

    @property
    def prompt(self) -> np.ndarray:
        """Prompt of the present turn, int32."""
        return self.group.prompt if self.turn_prompt is None else self.turn_prompt

    @property
    def features(self) -> PromptFeatures | None:
        """Features of the present turn's context."""
        return self.group.features if self.turn_prompt is None else self.turn_features

    def next_turn(
        self, key: SampleKey, prompt: np.ndarray, max_tokens: int, hold_s: float, now_s: float,
        features: PromptFeatures | None = None,
    ) -> "SampleRecord":  # fmt: skip
        """Returns the record of the sample's next turn. `prompt` (int32): the context so far, and tokens from outside.
        `features`: features of the whole prompt.
        """
        return SampleRecord(
            group=self.group,
            index=self.index,
            key=key,
            forced=None,
            asked_s=now_s,
            tokens=self.tokens,
            earlier_tokens=self.tokens,
            outside_tokens=self.outside_tokens + len(prompt) - len(self.context()),
            turn_prompt=prompt,
            turn_features=features,
            max_tokens=self.tokens + max_tokens,
            hold_s=hold_s,
            routed=self.routed,
            kv_names=self.kv_names,
        )

    def context(self) -> np.ndarray:
        """Returns prompt and answer so far, int32."""
        return np.concatenate([self.prompt, *(part.token_ids for part in self.parts)])

    def append(
        self, start: int, part: ChunkResult, replica_id: str, weights_digest: str = "", adapter_digest: str = ""
    ) -> bool:
        """Writes a chunk that began at answer position `start`. Returns whether another replica made the part before.

        Raises ValueError unless `start` is the next position.
        """
        if start != self.tokens:
            raise ValueError(f"chunk {part.chunk_id} begins at {start}, the sample has {self.tokens} tokens")
        end = start + len(part.token_ids)
        first, last_place = start - self.earlier_tokens, end - self.earlier_tokens
        last = self.segments[-1] if self.segments else None
        made_by = replica_id, part.weights_version, adapter_digest
        if last and (last.replica_id, last.weights_version, last.adapter_digest) == made_by:
            self.segments[-1] = last.model_copy(update={"end": last_place})
        elif end > start:
            self.segments.append(
                Segment(
                    weights_version=part.weights_version,
                    weights_digest=weights_digest,
                    adapter_digest=adapter_digest,
                    replica_id=replica_id,
                    start=first,
                    end=last_place,
                )
            )
        if not self.kv_names.startswith(part.kv_names):  # a chunk aborted in its context has computed fewer blocks
            self.kv_names = part.kv_names
        self.parts.append(replace(part, kv_names=b""))  # else each part would keep the names of its whole context
        self.tokens = end
        self.routed += len(part.routed_experts) if part.routed_experts is not None else 0
        if self.grown is not None:
            self.grown()
        return last is not None and last.replica_id != replica_id

    def updates(self, version: int) -> int:
        """Returns by how many versions its tokens are older than `version`, summed over tokens."""
        return sum((version - one.weights_version) * (one.end - one.start) for one in self.segments)

    def count_updates(self, version: int) -> int:
        """Returns `updates` at the end of the present turn, 0 if it has been asked before: its sample was held."""
        was_counted, self.is_counted = self.is_counted, True
        return 0 if was_counted else self.updates(version)

    def join(self) -> None:
        """Concatenates the columns of all parts, once the sample has ended: a few tenths of a millisecond for 32,000
        tokens. The end of a group, when all samples are delivered at once, then copies nothing.
        """
        ends = list(accumulate(len(part.token_ids) for part in self.parts))
        for name, dtype in COLUMNS.items():
            whole = joined([getattr(part, name) for part in self.parts], dtype)
            self.columns[name] = Column(whole)
        for place, (start, end) in enumerate(pairwise([0, *ends])):
            cut = {name: column.array[start:end] for name, column in self.columns.items()}
            self.parts[place] = replace(self.parts[place], **cut)

    def detail(self, sample_id: str, prompts: Prompts, more: np.ndarray | None = None) -> SampleDetail:
        """Returns the unended sample for display, with the text of its last tokens. `more`: tokens of its running
        chunk.
        """
        more = () if more is None else (more,)
        last = joined([*(part.token_ids for part in self.parts), *more], np.int32)[-SHOWN_TOKENS:].tolist()
        return SampleDetail(
            sample_id=sample_id,
            tokens=self.tokens,
            segments=tuple(self.segments),
            cached_tokens=sum(part.cached_tokens for part in self.parts),
            computed_tokens=sum(part.computed_tokens for part in self.parts),
            drafted_tokens=sum(part.drafted_tokens for part in self.parts),
            accepted_tokens=sum(part.accepted_tokens for part in self.parts),
            text_tokens=len(last),
            text=prompts.decode(last),
        )

    def result(self, prompts: Prompts) -> SampleResult:
        """Returns the ended sample as callers of single samples get it, with its text."""
        made = self.result_without_text("")
        made.decode_by(lambda token_ids, rule: text_of(token_ids, rule, prompts.decode))
        made.settle()
        return made

    def result_without_text(self, tokenizer: str) -> SampleResult:
        """Returns the ended sample as drivers of batches get it: the client decodes its text by the named tokenizer.

        Its values come from this process, and are not validated again.
        """
        if not self.columns:
            self.join()
        sampling = self.group.group.sampling
        return SampleResult.later(
            TextRule(tokenizer, self.end is SampleEnd.STOP, sampling.stop, sampling.stop_token_ids),
            sample_index=self.index,
            **self.columns,
            finish_reason=self.end,
            error=self.error,
            chunks=len(self.parts),
            cached_tokens=sum(part.cached_tokens for part in self.parts),
            computed_tokens=sum(part.computed_tokens for part in self.parts),
            segments=tuple(self.segments),
            timings=self._timings(),
            verifications=sum(part.verifications for part in self.parts),
            drafted_tokens=sum(part.drafted_tokens for part in self.parts),
            accepted_tokens=sum(part.accepted_tokens for part in self.parts),
            top_logprobs=tuple(chain.from_iterable(part.top_logprobs for part in self.parts)),
            sampling_mask=tuple(chain.from_iterable(part.sampling_mask for part in self.parts)),
            prompt_logprobs=next((part.prompt_logprobs for part in self.parts if part.prompt_logprobs), None),
            routed_experts=RoutedExperts.joined(part.routed_experts for part in self.parts),
            close_calls=self._close_calls(),
            **self._drafts(),
        )

    def _close_calls(self) -> tuple[int, ...]:
        starts = accumulate((len(part.token_ids) for part in self.parts), initial=0)
        return tuple(
            start + place for start, part in zip(starts, self.parts, strict=False) for place in part.close_calls
        )

    def _drafts(self) -> dict:
        total = DraftReport.none(0)
        for part in self.parts:
            if part.drafts is not None:
                total.add(part.drafts)
        return {
            "drafted_by_source": by_source(total.drafted),
            "accepted_by_source": by_source(total.accepted),
            "accepted_by_position": tuple(total.accepted_at.tolist()),
        }

    def answer(self) -> Answer:
        """Returns the ended sample as the group context keeps it."""
        tokens = self.context()[len(self.group.prompt) :]
        version = self.parts[-1].weights_version if self.parts else 0
        return Answer(
            sample_index=self.index,
            weights_version=version,
            reward=None,
            finished=self.end is SampleEnd.STOP,
            tokens=tokens,
            outside_tokens=self.outside_tokens,
        )

    def _timings(self) -> Timings:
        return Timings(
            started_s=self.started_s or 0.0,
            finished_s=self.finished_s,
            queue_s=sum(part.queue_s for part in self.parts),
            prefill_s=sum(part.prefill_s for part in self.parts),
            decode_s=sum(part.decode_s for part in self.parts),
        )


def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    """Concatenates arrays of one dtype in order."""
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])


def shared_tokens(one: np.ndarray, other: Sequence[int]) -> int:
    """Returns the length of the common beginning of two contexts."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != np.asarray(other[:length], one.dtype))
    return int(differs[0]) if len(differs) else length


def escaped(name: str, mark: str) -> str:
    """Escapes the separator `mark` in a name, `%` and the mark as in URLs. Most names stay as they are."""
    return name.replace("%", "%25").replace(mark, f"%{ord(mark):02X}")


@dataclass(slots=True)
class GroupRecord:
    """The samples of one prompt; `prompt` is int32."""

    batch_id: str
    step: int
    group: PromptGroup
    prompt: np.ndarray
    prompt_key: str
    adapter: Adapter | None = None  # adapter of all its samples, whatever content its name gets later
    features: PromptFeatures | None = None
    samples: list[SampleRecord] = field(default_factory=list)
    prompt_kv_names: set[bytes] = field(default_factory=set)  # one entry per version that the group has run under
    log_name: bytes = b""  # its name in the token log, once that has a record of it

    @classmethod
    def of(
        cls, batch_id: str, step: int, prepared: Prepared, keys: list[SampleKey], asked_s: float = 0.0
    ) -> "GroupRecord":
        prompt = np.asarray(prepared.token_ids, np.int32)
        record = cls(
            batch_id=batch_id,
            step=step,
            group=prepared.group,
            prompt=prompt,
            prompt_key=prepared.prompt_key,
            adapter=prepared.adapter,
            features=prepared.features,
        )
        for index, key in enumerate(keys):
            forced = prepared.group.forced_token_ids
            tokens = None if forced is None else np.asarray(forced[index], dtype=np.int32)
            record.samples.append(SampleRecord(record, index, key, tokens, asked_s))
        return record

    @property
    def ref(self) -> GroupRef:
        """The group's name in the group context; unique to this batch and prompt."""
        return GroupRef(f"{escaped(self.batch_id, '/')}/{self.group.prompt_id}", self.prompt_key)

    def begun(self) -> tuple[Begun, ...]:
        """The samples that have tokens, as the core expects them."""
        return tuple(
            Begun(
                sample.index, sample.tokens, sample.parts[-1].end is ChunkEnd.STOP, sample.segments[-1].weights_version
            )
            for sample in self.samples
            if sample.tokens
        )

    def result(self, prompts: Prompts) -> GroupResult:
        """Returns the group as drivers get it; its values are not validated again. The driver decodes the texts, or
        they are decoded here if the tokenizer cannot be had elsewhere.
        """
        name = prompts.tokenizer_name
        return GroupResult.model_construct(
            batch_id=self.batch_id,
            prompt_id=self.group.prompt_id,
            prompt_token_ids=Column(self.prompt),
            samples=tuple(one.result_without_text(name) if name else one.result(prompts) for one in self.samples),
            prompt_key=self.prompt_key,
            step=self.step,
        )
