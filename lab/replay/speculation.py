"""Speculation by replay: modelled replicas draft with an engine's own code; recorded tokens decide acceptance.

Each replica has the `EngineDrafts` of a live one: index, evidence, policy, measured step costs, counts; a `Wire`
between them replaces the group context. Every step is simulated: propose, budget, compare, one token more. A run is
therefore exact and repeatable, but takes 0.1 to 0.2 ms a verification: time grows with tokens, not with chunks.
Invariant: no draft is made from a token before it is generated. Called by `tailrace simulate` and `bench calibrate`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tailrace.deployments.draft_index.proposal import accepted_tokens
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.drafting.drafts import EngineDrafts
from tailrace.deployments.engine.warmup import VERIFIED
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.lab.replay.recorded import Recorded
from tailrace.lab.replay.wire import Wire, WireEnd
from tailrace.lab.simulator.chunks import SimulatedChunk
from tailrace.lab.simulator.speculation import Pace
from tailrace.lab.simulator.types import StepModel, Workload
from tailrace.policies.families.drafting import Drafting
from tailrace.policies.protocol.performance import MethodAcceptance

MODEL_LEN = 1 << 20
"""Maximum length in tokens, never reached: the workload ends samples before."""


@dataclass(slots=True)
class _StandInRequest:
    """The fields of vLLM's request that `EngineDrafts` reads and writes."""

    num_tokens: int
    spec_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    """A chunk on this replica, which makes tokens [at, end) of the answer."""

    request: _StandInRequest
    answer: list[int]
    at: int
    end: int

    def coming(self) -> int:
        """Returns the number of tokens that the next step makes: the right ones of the draft, and one more."""
        draft = self.request.spec_token_ids
        end = min(self.end, self.at + len(draft) + 1)
        return min(accepted_tokens(draft, self.answer[self.at : end]) + 1, end - self.at)


class Replayed:
    """One replica's speculation (`lab.simulator.speculation.Speculation`)."""

    methods = ()

    def __init__(self, drafts: EngineDrafts, wire: Wire, policy: Drafting, step: StepModel, max_tokens: int):
        self._drafts, self._recorded, self._policy, self._step = drafts, wire.recorded, policy, step
        self._max_tokens = max_tokens
        self.most = min(policy.max_draft_tokens, DraftConfig().draft_tokens)
        self._running: dict[str, _Running] = {}
        self._cost, self._stepped = (
            (0, 0.0, 0),
            False,
        )  # the step that runs: tokens, seconds, chunks; whether it is over
        for chunks, tokens in VERIFIED:
            computed = chunks * (1 + tokens)
            self._drafts.performance.steps.record(computed, step.seconds(computed, 0), chunks)

    def stale(self, changes: int, running: int) -> bool:
        return changes > 0

    def pace(self, chunks: list[SimulatedChunk], context_tokens: float) -> Pace:
        """Returns the pace of the coming step. A second call before the same step returns the same for known chunks."""
        running = [self._running.get(chunk.chunk_id) or self._open(chunk) for chunk in chunks]
        for chunk, one in zip(chunks, running, strict=True):
            self._settle(chunk, one)
        if self._stepped:
            self._drafts.performance.steps.record(*self._cost)
            self._drafts.propose()
            self._stepped = False
        rates = [float(one.coming()) for one in running]
        costs = [1.0 + len(one.request.spec_token_ids) for one in running]
        computed = int(sum(costs))
        self._cost = computed, self._step.seconds(computed, context_tokens), len(running)
        return Pace(rates, costs, steps=1)

    def drop(self, chunk: SimulatedChunk) -> None:
        if (running := self._running.pop(chunk.chunk_id, None)) is not None:
            self._settle(chunk, running)
            self._drafts.close(chunk.chunk_id)

    def acceptance(self) -> tuple[MethodAcceptance, ...]:
        return self._drafts.performance.acceptance.report()

    def _open(self, chunk: SimulatedChunk) -> _Running:
        sample, at = chunk.sample, chunk.generated
        group_id = sample.progress.group.group_id
        prompt, answers, _ = recorded = self._recorded[group_id]
        answer, end = answers[sample.index], sample.made + chunk.tokens
        # Where the sample ends by itself, its chunk was longer, since the end was unknown.
        until = end if end < sample.length else self._max_tokens
        group = GroupRef(group_id, group_id)
        plan = DraftPlan(
            group=group,
            sample_index=sample.index,
            epoch=recorded.epoch,
            expected_tokens=chunk.expected_tokens,
            class_starts=chunk.class_starts,
            policy=self._policy,
        )
        context = np.concatenate([prompt, answer[:at]])
        request = _StandInRequest(len(context))
        what = chunk.chunk_id, 0, context, len(prompt), until - at, SamplingParams(), 0
        self._drafts.open(ChunkRequest(*what, draft=plan), request)
        self._drafts.settle()
        running = self._running[chunk.chunk_id] = _Running(request, answer.tolist(), at, end)
        return running

    def _settle(self, chunk: SimulatedChunk, running: _Running) -> None:
        """Reports the chunk's tokens since the last report."""
        tokens = running.answer[running.at : chunk.generated]
        if tokens:
            running.at += len(tokens)
            running.request.num_tokens += len(tokens)
            running.request.spec_token_ids = []
            self._drafts.made_by([(chunk.chunk_id, tokens)])
            self._stepped = True


@contextmanager
def replaying(
    workload: Workload,
    recorded: Mapping[str, Recorded],
    policy: Drafting,
    step: StepModel,
    settings: IndexSettings = IndexSettings(),  # noqa: B008 -- frozen
) -> Iterator:
    """Yields the `speculation` argument of `simulate`, for a workload of one step whose groups are recorded, by group
    id. Yields None for a policy that never drafts.

    Every replica costs 20 ms at the start, and 70 bytes a token for an index of each group that it has run. Raises
    ValueError if a group is not recorded, or its answers have other lengths.
    """
    (groups,) = workload.steps
    for group in groups:
        known = recorded.get(group.group_id)
        if known is None or tuple(map(len, known.answers)) != group.lengths:
            raise ValueError(f"{workload.name}: the answers of {group.group_id} are not those that were recorded")
    wire, started = Wire(recorded), []

    def replayed(index: int) -> Replayed:
        started.append(drafts := EngineDrafts(DraftConfig(index=settings), MODEL_LEN, WireEnd(wire, index)))
        return Replayed(drafts, wire, policy, step, workload.max_tokens)

    try:
        yield replayed if policy.max_draft_tokens else None
    finally:
        for drafts in started:
            drafts.stop()
