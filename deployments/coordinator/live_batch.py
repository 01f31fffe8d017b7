"""One batch in flight: its groups' records, its spans, and the queue its driver reads.

Invariant: `ended` and `emitted` only grow, and the batch is over when every group has been emitted.
Called by `Rollouts` alone.
"""

import asyncio
from collections.abc import Iterable, Mapping

from opentelemetry.trace import Span

from tailrace.deployments.context.history import PastLength
from tailrace.deployments.coordinator.ledger import GroupRecord, SampleRecord
from tailrace.deployments.coordinator.prompts import Prepared
from tailrace.deployments.messages.chunk import ChunkRequest, KvPlan, sample_key
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.deployments.messages.status import BatchStatus
from tailrace.deployments.telemetry import Telemetry, traceparent
from tailrace.policies.families.drafting import Drafting
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.events import GroupSpec

TAIL_SHARE = 0.9
"""The tail is the time spent on the last 10 % of samples to finish."""


class LiveBatch:
    """Records by group id; a sample's id is `GROUP_ID#INDEX`, as in the core."""

    def __init__(
        self, message: RolloutBatch, prepared: list[Prepared], past: Mapping[str, list[PastLength]], submitted_s: float
    ):
        """`past`: lengths of earlier epochs by prompt key, newest epoch first."""
        self.message, self.submitted_s = message, submitted_s
        self.groups: dict[str, GroupRecord] = {}
        for one in prepared:
            name = one.group.prompt_id
            keys = [sample_key(message.seed, message.step, name, index) for index in range(one.group.samples)]
            self.groups[f"{message.batch_id}/{name}"] = GroupRecord.of(message.batch_id, message.step, one, keys)
        self.specs = tuple(
            GroupSpec(
                group_id, len(one.token_ids), one.group.samples, one.max_tokens, by_epoch(past.get(one.prompt_key, []))
            )
            for group_id, one in zip(self.groups, prepared, strict=True)
        )
        self._max_tokens = {spec.group_id: spec.max_tokens for spec in self.specs}
        self.samples = {f"{group_id}#{s.index}": s for group_id, group in self.groups.items() for s in group.samples}
        self.ready: asyncio.Queue = asyncio.Queue()
        self.ended = self.emitted = 0
        self.span: Span | None = None
        self.group_spans: dict[str, Span] = {}

    @property
    def over(self) -> bool:
        return self.emitted == len(self.groups)

    def true_lengths(self) -> dict[str, int]:
        """By sample id; known only of samples that replay a trace."""
        return {name: len(sample.forced) for name, sample in self.samples.items() if sample.forced is not None}

    def open_spans(self, telemetry: Telemetry) -> None:
        """One span for the rollout, below the driver's, and one per group below that."""
        message = self.message
        self.span = telemetry.span(
            "rollout", message.traceparent, keep=message.keep_trace, attributes={"batch_id": message.batch_id}
        )
        for group_id, group in self.groups.items():
            attributes = {"prompt_id": group.group.prompt_id}
            self.group_spans[group_id] = telemetry.span("group", traceparent(self.span), attributes=attributes)

    def chunk_span(self, telemetry: Telemetry, start: StartChunk) -> Span:
        group_id, _, index = start.sample_id.rpartition("#")
        attributes = {
            "chunk_id": start.chunk_id,
            "sample_index": int(index),
            "replica_id": start.replica_id,
            "start": start.start,
            "weights_version": start.weights_version,
            "reason": start.reason,
        } | ({"copy_of": start.copy_of, "method": start.method} if start.copy_of else {})
        return telemetry.span("chunk", traceparent(self.group_spans[group_id]), attributes=attributes)

    def request(self, sample: SampleRecord, start: StartChunk, span: Span, drafting: Drafting) -> ChunkRequest:
        """What the engine needs to continue with `sample` where it stands."""
        plan = self._draft_plan(sample, start, drafting) if drafting.max_draft_tokens else None
        context_tokens = len(sample.group.prompt) + start.start  # another chunk of a race may have ended meanwhile
        return ChunkRequest(
            chunk_id=start.chunk_id,
            sample_key=sample.key,
            token_ids=sample.context()[:context_tokens],
            prompt_tokens=len(sample.group.prompt),
            max_tokens=start.max_tokens,
            sampling=sample.group.group.sampling,
            weights_version=start.weights_version,
            kv=self._kv_plan(start),
            draft=plan,
            forced=sample.forced,
            traceparent=traceparent(span),
            keep_trace=self.message.keep_trace,
        )

    def _draft_plan(self, sample: SampleRecord, start: StartChunk, drafting: Drafting) -> DraftPlan:
        return DraftPlan(
            group=sample.group.ref,
            sample_index=sample.index,
            epoch=self.message.step,
            expected_tokens=start.expected_tokens,
            class_starts=start.class_starts,
            policy=drafting,
            way=start.way,
            method=start.method,
            most_tokens=self._max_tokens[start.sample_id.rpartition("#")[0]],
        )

    def _kv_plan(self, start: StartChunk) -> KvPlan:
        """Saving pays only if the sample may continue after this chunk."""
        continues = start.start + start.max_tokens < self._max_tokens[start.sample_id.rpartition("#")[0]]
        return KvPlan(start.kv_version, start.min_pull_tokens, continues)

    def status(self, now_s: float, streamed: Mapping[str, int]) -> BatchStatus:
        """`streamed`: tokens of running chunks, by chunk id, as last reported."""
        prefix = f"{self.message.batch_id}/"
        running = sum(tokens for chunk_id, tokens in streamed.items() if chunk_id.startswith(prefix))
        return BatchStatus(
            batch_id=self.message.batch_id,
            samples=len(self.samples),
            ended=self.ended,
            groups=len(self.groups),
            emitted=self.emitted,
            tokens=running + sum(sample.tokens for sample in self.samples.values()),
            tail=self.ended >= TAIL_SHARE * len(self.samples),
            seconds=now_s - self.submitted_s,
        )


def by_epoch(lengths: Iterable[PastLength]) -> tuple[tuple[int, ...], ...]:
    """Lengths in tokens of each epoch, in the order in which the epochs come."""
    epochs: dict[int, list[int]] = {}
    for past in lengths:
        epochs.setdefault(past.epoch, []).append(past.length_tokens)
    return tuple(map(tuple, epochs.values()))
