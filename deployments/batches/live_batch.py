"""One submission of a batch in flight: the records of its groups, and its spans.

Invariant: a group leaves with its samples when it is emitted, and the batch is over when none is left. Called by
`Rollouts` alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from opentelemetry.trace import Span

from tailrace.deployments.batches.batch_spans import BatchSpans
from tailrace.deployments.batches.deliveries import Delivery
from tailrace.deployments.batches.prompts import Prepared, Prompts
from tailrace.deployments.batches.records import GroupRecord, SampleRecord, escaped
from tailrace.deployments.context.history import PastLength
from tailrace.deployments.messages.adapters import digest_of
from tailrace.deployments.messages.chunk import ChunkRequest, KvPlan, sample_key
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.logged_tokens import LoggedTokens
from tailrace.deployments.messages.rollout import BatchSettings, PromptGroup, Rejected
from tailrace.deployments.messages.status import BatchStatus
from tailrace.deployments.telemetry import Telemetry, traceparent
from tailrace.policies.families.drafting import Drafting
from tailrace.policies.protocol.actions import EndSample, EndTurn, StartChunk
from tailrace.policies.protocol.events import GroupSpec, Prediction, SamplesSubmitted

TAIL_SHARE = 0.9
"""Share of samples that have ended when the tail begins: it is the time spent on the last 10 % of samples to finish."""


class LiveBatch:
    """Records by group id; a sample's id is `GROUP_ID#INDEX`, as in the core."""

    def __init__(
        self,
        message: BatchSettings,
        core_id: str,
        delivery: Delivery | None,
        prepared: list[Prepared],
        past: Mapping[str, list[PastLength]],
        submitted_s: float,
    ):
        """`core_id`: the batch's name in the core, unique among all submissions past and present, so that no late
        answer is taken for one of a later batch with the same name. `past`: lengths of earlier epochs by prompt key,
        newest first.
        """
        self.message, self.core_id, self.submitted_s = message, core_id, submitted_s
        self.delivery = delivery
        self.groups: dict[str, GroupRecord] = {}
        for one in prepared:
            name = one.group.prompt_id
            keys = [sample_key(message.seed, message.step, name, index) for index in range(one.group.samples)]
            record = GroupRecord.of(message.batch_id, message.step, one, keys, submitted_s)
            self.groups[f"{core_id}/{escaped(name, '#')}"] = record
        self.specs = tuple(
            GroupSpec(
                group_id=group_id,
                prompt_tokens=len(one.token_ids),
                samples=one.group.samples,
                max_tokens=one.max_tokens,
                past_lengths=by_epoch(past.get(one.prompt_key, [])),
                prediction=prediction_of(one.group),
            )
            for group_id, one in zip(self.groups, prepared, strict=True)
        )
        self._max_tokens = {spec.group_id: spec.max_tokens for spec in self.specs}
        self.samples = {f"{group_id}#{s.index}": s for group_id, group in self.groups.items() for s in group.samples}
        self._sizes = len(self.samples), len(self.groups)
        self.emitted_tokens = 0
        self.ended = 0
        self.tail_began_s: float | None = None  # None before the tail
        self.progress_s = submitted_s  # of the last chunk that was written; `Rollouts` alone writes it
        self.spans: BatchSpans | None = None

    def submission(self, now_s: float) -> SamplesSubmitted:
        """Returns the event that submits the batch to the core."""
        message = self.message
        return SamplesSubmitted(
            now=now_s,
            batch_id=self.core_id,
            groups=self.specs,
            priority=message.priority,
            share=message.share,
            step=message.step,
        )

    @property
    def over(self) -> bool:
        return not self.groups

    @property
    def is_in_tail(self) -> bool:
        """True once 90 % of its samples have ended."""
        return self.ended >= TAIL_SHARE * self._sizes[0]

    def parts_s(self, now_s: float) -> dict[str, float]:
        """Returns the seconds of a finished batch before its tail (body) and in it (tail); a session has neither."""
        if self.delivery is None or self.tail_began_s is None:
            return {}
        return {"body": self.tail_began_s - self.submitted_s, "tail": now_s - self.tail_began_s}

    @property
    def is_logged(self) -> bool:
        """True if the tokens of its samples belong into the token log."""
        return not self.delivery.is_over

    def end(self, action: EndSample, now_s: float) -> SampleRecord:
        """Records the end of a sample. Returns its record."""
        sample = self.samples[action.sample_id]
        sample.end, sample.error = action.end, action.error
        sample.finished_s = now_s - sample.asked_s
        sample.join()
        self.ended += 1
        if self.tail_began_s is None and self.is_in_tail:
            self.tail_began_s = now_s
        return sample

    def end_turn(self, action: EndTurn, now_s: float) -> None:
        """Records the end of a turn whose sample is held."""
        sample = self.samples[action.sample_id]
        sample.end, sample.finished_s = action.end, now_s - sample.asked_s

    def answer(self, sample_id: str, prompts: Prompts) -> None:
        """Delivers an ended sample to its driver, if single samples are delivered."""

    def hand_out(self, group: GroupRecord, prompts: Prompts) -> None:
        """Delivers a group whose samples have ended to the driver."""
        self.delivery.put(group.result(prompts), group)

    def resume(self, found: Iterable[tuple[str, LoggedTokens]], may_be: Callable[[int, str], bool]) -> int:
        """Begins samples with tokens from the log, by prompt id. Returns the number of records that cannot belong to
        them.

        `may_be`: returns whether weights of this version and digest can have come before the present ones.
        """
        refused = 0
        for prompt_id, tokens in found:
            group_id, segment = f"{self.core_id}/{escaped(prompt_id, '#')}", tokens.segment
            group = self.groups.get(group_id)
            if group is None or segment.start != group.samples[tokens.index].tokens:
                continue  # the driver has the group, or a record before this one was refused
            fits = segment.end <= self._max_tokens[group_id] and segment.adapter_digest == digest_of(group.adapter)
            if fits and may_be(segment.weights_version, segment.weights_digest):
                part = tokens.part()
                made_by = segment.replica_id, segment.weights_digest, segment.adapter_digest
                group.samples[tokens.index].append(segment.start, part, *made_by)
            else:
                refused += 1
        self.specs = tuple(replace(spec, begun=self.groups[spec.group_id].begun()) for spec in self.specs)
        return refused

    def emit(self, group_id: str) -> GroupRecord:
        """Removes a group whose samples have ended. Returns its record."""
        group = self.groups.pop(group_id)
        for number, sample in enumerate(group.samples):
            self.emitted_tokens += sample.tokens
            del self.samples[f"{group_id}#{number}"]
        self.spans.close_group(group_id, [f"{group_id}#{number}" for number in range(len(group.samples))])
        return group

    def namesakes(self, group_id: str) -> list[GroupRecord]:
        """Returns the other groups with a group's name, whose samples may begin with the same tokens."""
        return []

    def fail(self, reason: str) -> None:
        """Ends the batch without its remaining groups; its driver gets the reason."""
        self._refuse(Rejected(reason=reason))
        self.spans.close()

    def _refuse(self, rejected: Rejected) -> None:
        self.delivery.put(rejected)

    def true_lengths(self) -> dict[str, int]:
        """Lengths in tokens by sample id; known only for samples that replay a trace."""
        return {name: len(sample.forced) for name, sample in self.samples.items() if sample.forced is not None}

    def open_spans(self, telemetry: Telemetry, model: str) -> None:
        """Opens the spans of the rollout, below the driver's, and of its groups. `model`: name of the model."""
        self.spans = BatchSpans(telemetry, self.message, model)
        for group_id in self.groups:
            self.open_group_span(group_id)

    def open_group_span(self, group_id: str) -> None:
        self.spans.open_group(group_id, self.groups[group_id].group.prompt_id)

    def chunk_span(self, start: StartChunk) -> Span:
        record = self.groups[start.sample_id.rpartition("#")[0]]
        return self.spans.open_chunk(start, record.group.sampling, record.adapter and record.adapter.name)

    def request(
        self, sample: SampleRecord, start: StartChunk, span: Span, drafting: Drafting, digests: Mapping[int, str]
    ) -> ChunkRequest:
        """Returns the engine's request to continue `sample` at its present length. `digests`: digests of weights by
        version.
        """
        plan = self._draft_plan(sample, start, drafting) if drafting.max_draft_tokens else None
        before = len(sample.group.prompt) + sample.outside_tokens
        context_tokens = before + start.start  # another chunk of a race may have ended meanwhile
        return ChunkRequest(
            chunk_id=start.chunk_id,
            sample_key=sample.key,
            token_ids=sample.context()[:context_tokens],
            prompt_tokens=len(sample.group.prompt),
            max_tokens=start.max_tokens,
            sampling=sample.group.group.sampling,
            weights_version=start.weights_version,
            weights_digest=digests.get(start.weights_version, ""),
            kv=self._kv_plan(sample, start, digests.get(start.kv_version, "")),
            draft=plan,
            forced=sample.forced,
            traceparent=traceparent(span),
            keep_trace=self.message.keep_trace,
            turn_start=before + sample.earlier_tokens,
            adapter=sample.group.adapter,
            routes_from=sample.routed,
            features=sample.features,
        )

    def _draft_plan(self, sample: SampleRecord, start: StartChunk, drafting: Drafting) -> DraftPlan:
        """Returns how the engine should draft for this chunk. For drafts, an answer is all that follows the group's
        prompt, tokens between turns included.
        """
        outside = sample.outside_tokens
        return DraftPlan(
            group=sample.group.ref,
            sample_index=sample.index,
            epoch=self.message.step,
            expected_tokens=outside + start.expected_tokens,
            class_starts=tuple(outside + tokens for tokens in start.class_starts),
            policy=drafting,
            way=start.way,
            method=start.method,
            most_tokens=outside + self._most(sample, start),
        )

    def _kv_plan(self, sample: SampleRecord, start: StartChunk, digest: str) -> KvPlan:
        """Returns how the engine should load and save KV. KV is saved only if the sample may continue after this chunk,
        or after this turn.
        """
        held = sample.hold_s > 0
        continues = held or start.start + start.max_tokens < self._most(sample, start)
        return KvPlan(start.kv_version, start.min_pull_tokens, continues, digest, save_stopped=held)

    def _most(self, sample: SampleRecord, start: StartChunk) -> int:
        """Returns the maximum number of tokens that the sample may generate, in its turns so far."""
        if sample.max_tokens is not None:
            return sample.max_tokens
        return self._max_tokens[start.sample_id.rpartition("#")[0]]

    def status(self, now_s: float, unix_s: float, tokens: int) -> BatchStatus:
        """Returns the batch's status. `unix_s`: unix seconds at the clock's 0. `tokens`: tokens of the groups that have
        not been emitted, those of running chunks included.
        """
        samples, groups = self._sizes
        return BatchStatus(
            batch_id=self.message.batch_id,
            core_id=self.core_id,
            samples=samples,
            ended=self.ended,
            groups=groups,
            emitted=groups - len(self.groups),
            tokens=self.emitted_tokens + tokens,
            tail=self.is_in_tail,
            seconds=now_s - self.submitted_s,
            began_s=unix_s + self.submitted_s,
            quiet_s=now_s - self.progress_s,
            session=self.delivery is None,
        )


def prediction_of(group: PromptGroup) -> Prediction | None:
    """Returns the driver's prediction for a prompt, as the core takes it."""
    given = group.prediction
    return None if given is None else Prediction(given.number, given.quality)


def by_epoch(lengths: Iterable[PastLength]) -> tuple[tuple[int, ...], ...]:
    """Groups lengths, in tokens, by epoch; epochs keep their order."""
    epochs: dict[int, list[int]] = {}
    for past in lengths:
        epochs.setdefault(past.epoch, []).append(past.length_tokens)
    return tuple(map(tuple, epochs.values()))
