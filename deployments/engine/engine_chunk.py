"""A chunk inside the engine: its times, its tokens and its result. Owned by the stepper."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tailrace.deployments.constraints.stop_texts import Decode, first_end
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult
from tailrace.deployments.messages.drafts import DraftReport
from tailrace.deployments.messages.errors import RequestRefused
from tailrace.deployments.messages.rollout import PromptLogprobs
from tailrace.deployments.vllm_exact.logprob_store import DrawRecord
from tailrace.deployments.vllm_exact.pause import is_paused
from tailrace.policies.protocol.events import ChunkEnd

RULES = "allowed_token_ids, bad_words, min_tokens, logit_bias or the answer's form"
"""Sampling parameters that can exclude every token."""


@dataclass(slots=True)
class EngineChunk:
    """Times are those of time.monotonic()."""

    chunk: ChunkRequest
    request_id: str  # vLLM's id
    request: object  # vLLM's scheduler-side Request: its computed tokens and its preemptions
    submitted_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0
    verifications: int = 0  # steps that emitted tokens
    token_ids: list[int] = field(default_factory=list)
    record: DrawRecord = field(default_factory=DrawRecord.none)  # of requests before the present one
    prompt_logprobs: PromptLogprobs | None = None
    redrawn: dict[int, DrawRecord] = field(default_factory=dict)  # by place in token_ids
    routes: np.ndarray | None = None  # routed experts, see `ChunkResult`
    reason: str | None = None  # reason of its end, once it has its last token
    is_out: bool = False  # it waits, without a request in vLLM, after a step that raised
    drawn_on_host: bool = field(init=False)  # its tokens have rules, extras or a given answer

    def __post_init__(self):
        sampling = self.chunk.sampling
        needs = self.chunk.forced is not None, sampling.changes_logits, sampling.top_logprobs, sampling.sampling_mask
        self.drawn_on_host = any(needs)

    def context(self) -> np.ndarray:
        """Returns the prompt and the answer so far, int32."""
        return np.concatenate([self.chunk.token_ids, np.array(self.token_ids, np.int32)])

    @property
    def keeps_kv(self) -> bool:
        """Returns whether its KV is saved even if it ends at a stop: its sample has another turn."""
        return self.chunk.kv is not None and self.chunk.kv.save_stopped

    def take(self, token_ids: list[int]) -> None:
        """Takes the tokens, one or more, that a step has emitted."""
        self.token_ids += token_ids
        self.verifications += 1

    def has_tokens(self, now_s: float, output) -> None:
        """Records the chunk's first tokens. `output`: vLLM's RequestOutput of the step."""
        if self.first_token_s is None:
            self.first_token_s, self.cached_tokens = now_s, output.num_cached_tokens
            if self.chunk.scores_prompt:
                self.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)

    def answer(self) -> list[int]:
        return self.context()[self.chunk.prompt_tokens :].tolist()

    def until_stop(self, token_ids: list[int], decode: Decode) -> tuple[list[int], bool]:
        """Returns the new tokens up to the one that completes a stop text, and whether there is one."""
        sampling = self.chunk.sampling
        if not sampling.stop or not token_ids:
            return token_ids, False
        answer = self.context()[self.chunk.answer_start :].tolist()
        end = first_end(answer + token_ids, len(answer), sampling.stop, sampling.min_tokens, decode)
        return (token_ids, False) if end is None else (token_ids[: end - len(answer)], True)

    def fault(self, record: DrawRecord) -> Exception | None:
        """Returns an error if a token was drawn from no distribution, else None. `record`: the record of all its
        tokens.
        """
        if not np.isnan(record.logprobs.sum()):
            return None
        at = int(np.isnan(record.logprobs).argmax())
        place = (
            f"chunk {self.chunk.chunk_id}: answer position {len(self.chunk.token_ids) - self.chunk.prompt_tokens + at}"
        )
        if np.isnan(record.raw_logprobs[at]):
            return RuntimeError(f"{place}: the model's logits are no numbers")
        return RequestRefused(f"{place}: no token is left; {RULES} exclude all")

    def result(self, end: ChunkEnd, record: DrawRecord, tolerance: float, drafts: DraftReport | None) -> ChunkResult:
        """Returns the chunk's result as of now. `record`: the record of all its tokens. `tolerance`: the tolerance of
        close calls.
        """
        now_s = time.monotonic()
        scheduled_s = self.scheduled_s or now_s
        first_token_s = self.first_token_s or now_s
        lacks = len(self.chunk.token_ids) + len(self.token_ids) - 1 - self.chunk.routes_from
        return ChunkResult(
            chunk_id=self.chunk.chunk_id,
            token_ids=np.asarray(self.token_ids, np.int32),
            logprobs=record.logprobs,
            raw_logprobs=record.raw_logprobs,
            end=end,
            weights_version=self.chunk.weights_version,
            queue_s=scheduled_s - self.submitted_s,
            prefill_s=first_token_s - scheduled_s,
            decode_s=now_s - first_token_s,
            cached_tokens=self.cached_tokens,
            computed_tokens=len(self.chunk.token_ids) - self.cached_tokens if self.first_token_s else 0,
            verifications=self.verifications,
            drafted_tokens=record.drafted,
            accepted_tokens=record.accepted,
            drafts=drafts,
            top_logprobs=record.tops,
            sampling_mask=record.masks,
            prompt_logprobs=self.prompt_logprobs,
            routed_experts=None if self.routes is None else self.routes[: max(0, lacks)],
            close_calls=tuple(np.flatnonzero(record.margins < np.float32(tolerance)).tolist()),
        )


def never_begun(chunk: ChunkRequest, submitted_s: float) -> ChunkResult:
    """Returns the result of a chunk that was aborted before it was in a step."""
    waiting = EngineChunk(chunk, "", None, submitted_s)
    return waiting.result(ChunkEnd.ABORTED, waiting.record, 0.0, None)


def tokens_to_verify(chunks: Iterable[EngineChunk]) -> int:
    """Returns the tokens of the next step, drafts included, if every chunk only decodes in it; else 0."""
    tokens = 0
    for running in chunks:
        if running.is_out:
            continue
        if running.first_token_s is None:
            return 0
        if not is_paused(running.request):
            tokens += 1 + len(running.request.spec_token_ids)
    return tokens


def prompt_logprobs(flat) -> PromptLogprobs:
    """Converts vLLM's FlatLogprobs of a prompt: at each position but the first its own token, then others."""
    tops = list(zip(flat.token_ids, flat.logprobs, strict=True))
    places = list(zip(flat.start_indices, flat.end_indices, strict=True))[1:]
    own = [start for start, _ in places]
    return PromptLogprobs(
        logprobs=tuple(flat.logprobs[at] for at in own),
        ranks=tuple(flat.ranks[at] for at in own),
        top=tuple(tuple(tops[start + 1 : end]) for start, end in places),
    )
