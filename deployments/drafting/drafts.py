"""The drafts of one engine: tokens go into their group's index, proposals come out, a policy says how much of each.
Where a draft model has sent some by then, they are proposed instead.

Runs beside vLLM's scheduler, on the engine's thread, between two steps: what is set as a request's `spec_token_ids` is
verified in the next one. Invariant: nothing here waits or changes a token (the exact sampler verifies by equality), and
a request gets no more drafts than vLLM will verify, so that what is counted here is what was verified.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tailrace.deployments.draft_index.group_index import warm_up
from tailrace.deployments.draft_index.proposal import Proposal
from tailrace.deployments.drafting.group_indexes import GroupIndexes, IndexedGroup
from tailrace.deployments.drafting.guesses import NOTHING, agreed, behind, cut
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import Source
from tailrace.deployments.messages.drafts import EVIDENCE, DraftReport
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.deployments.vllm_exact.pause import pause, resume
from tailrace.policies.models.step_cost_estimator import StepCostEstimator
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.step_cost import StepCost
from tailrace.policies.protocol.views import DraftView

if TYPE_CHECKING:  # the feed brings Ray, which nothing else here needs
    from tailrace.deployments.context.context_client import ContextClient
    from tailrace.deployments.drafter.client import Drafters
    from tailrace.deployments.drafting.forks import Fork, Forks

ALL_EVIDENCE = 8
"""Samples of a step up to which each is drafted with all its evidence. With 64, an eighth of it each costs 0.7 % of the
throughput by `bench budgets`, and saves half of the time that drafting takes."""

LOOK_S = 0.25
"""Between two looks at how large the indexes are: the engine reports after every step, and there can be thousands."""

FADE = 0.99
"""Of the replica's acceptance: a verification 70 ago weighs one half."""

NO_MODEL = DraftMode(0, True)
"""Of chunks that draft by a part of the index: no drafter hears of them, and they wait for none."""


@dataclass(slots=True)
class DraftedTokens:
    """A chunk that drafts: its request inside vLLM, and how its drafts went."""

    chunk: ChunkRequest
    request: object  # vLLM's scheduler-side Request
    group: IndexedGroup
    slot: int
    generated: int  # answer tokens so far
    until: int  # answer tokens at which the chunk ends
    report: DraftReport
    draft: Proposal  # that is being verified, or was in the step that has just ended
    accepted: int = 0  # of it


class EngineDrafts:
    """`feed`: what mates elsewhere write; None: only this engine's own samples are known. `model`: draft models."""

    def __init__(
        self, config: DraftConfig, max_model_len: int, feed: ContextClient | None, model: Drafters | None = None
    ):
        self._draft_tokens, self._max_model_len = config.draft_tokens, max_model_len
        self._indexed = config.method == "group"
        self._groups, self._feed, self._model = GroupIndexes(config, feed), feed, model
        self._running: dict[str, DraftedTokens] = {}  # by chunk id
        self._fresh: list[DraftedTokens] = []  # those that have made tokens in this step
        self._free: list[int] = []
        self._policy = self._memory = None
        self._times = StepCostEstimator()
        self._accepted, self._drafted = 0.5, 1.0  # faded; the guess counts as much as one draft token
        self._counts: Counter[str] = Counter()
        self._spent_s = 0.0
        self._sizes: dict[str, int] = {}
        self._looked_s = -LOOK_S
        warm_up()

    # ---- what the stepper tells it -----------------------------------------------------------------

    def open(self, chunk: ChunkRequest, request) -> None:
        """A chunk has been added; without a plan it does not draft."""
        plan = chunk.draft
        if plan is None:
            return
        prompt, answer = chunk.token_ids[: chunk.prompt_tokens], chunk.token_ids[chunk.prompt_tokens :]
        group = self._groups.open(plan.group, plan.epoch, prompt)
        group.index.extend(plan.sample_index, 0, answer)
        slot = self._free.pop() if self._free else len(self._running)
        report, until = DraftReport.none(self._draft_tokens), len(answer) + chunk.max_tokens
        self._running[chunk.chunk_id] = DraftedTokens(
            chunk=chunk,
            request=request,
            group=group,
            slot=slot,
            generated=len(answer),
            until=until,
            report=report,
            draft=NOTHING,
        )
        if self._model is not None:
            self._model.open(chunk, NO_MODEL if plan.method in EVIDENCE else plan.way)
        if plan.policy != self._policy:
            self._policy, self._memory = plan.policy, None

    def settle(self) -> None:
        """Wait for the histories of open groups; an engine never does, a replay on a modelled clock does."""
        self._groups.settle()

    def made(self, chunk_id: str, tokens: list[int]) -> None:
        """A step has emitted these tokens of a chunk: the accepted part of its draft, and one more."""
        drafted = self._running.get(chunk_id)
        if drafted is None or not tokens:
            return
        began_s = time.perf_counter()
        start = drafted.generated
        drafted.generated += len(tokens)
        draft = drafted.draft
        drafted.accepted = accepted = agreed(draft.tokens.tolist(), tokens) if len(draft.tokens) else 0
        drafted.report.count(draft.sources, accepted)
        if len(draft.tokens):
            self._accepted = FADE * self._accepted + accepted
            self._drafted = FADE * self._drafted + len(draft.tokens)
        if self._model is not None:
            self._model.made(chunk_id, tokens)
            if len(draft.sources) and draft.sources[0] == Source.MODEL:
                self._model.judge(chunk_id, accepted, len(draft.tokens))
        self._spread(drafted, start, tokens)
        self._fresh.append(drafted)
        self._spent_s += time.perf_counter() - began_s

    def close(self, chunk_id: str, goes_on: bool = False) -> DraftReport | None:
        """A chunk has ended: how its drafts went; None when it had no plan. `goes_on`: its sample may do so here."""
        drafted = self._running.pop(chunk_id, None)
        if drafted is None:
            return None
        self._groups.close(drafted.group)
        if self._model is not None:
            drafted.report.model_tested, drafted.report.model_accepted = self._model.close(chunk_id, goes_on)
        self._free.append(drafted.slot)
        for source in Source:
            self._counts[f"drafted.{source.name.lower()}"] += int(drafted.report.drafted[source])
            self._counts[f"accepted.{source.name.lower()}"] += int(drafted.report.accepted[source])
        return drafted.report

    def timed(self, tokens: int, took_s: float) -> None:
        """A step that verified `tokens` tokens, and prefilled none, took so long."""
        self._times.record(tokens, took_s)

    # ---- what it does ------------------------------------------------------------------------------

    def heard(self, chunk: ChunkRequest, start: int, tokens: list[int]) -> None:
        """A copy of the chunk has made these tokens: the chunk will too."""
        if (drafted := self._running.get(chunk.chunk_id)) is not None and tokens:
            self._spread(drafted, start, tokens)

    def _spread(self, drafted: DraftedTokens, start: int, tokens: list[int]) -> None:
        """To the index here, and to the mates elsewhere."""
        plan = drafted.chunk.draft
        drafted.group.index.extend(plan.sample_index, start, tokens)
        if self._feed is not None:
            self._feed.append(plan.group, plan.sample_index, start, tokens)

    def propose(self, forks: Forks | None = None) -> None:
        """After a step: give every request that continues its draft for the next one, its forks the other branches."""
        began_s = time.perf_counter()
        self._groups.receive()
        fresh = [drafted for drafted in self._fresh if drafted.chunk.chunk_id in self._running]
        fresh, self._fresh = self._apart(fresh)
        cost = self._times.cost()
        if fresh and cost is not None and self._policy.max_draft_tokens:
            proposals = self._proposals(fresh, cost)
            budgets, self._memory = self._policy.decide(self._view(fresh, proposals, cost), self._memory)
            for drafted, proposal, budget in zip(fresh, proposals, budgets.tolist(), strict=True):
                drafted.draft = cut(proposal, budget)
                drafted.request.spec_token_ids = drafted.draft.tokens.tolist() if budget else []
                if forks is not None and budget:
                    self._branch(drafted, forks.fresh(drafted.chunk.chunk_id), budget)
        self._spent_s += time.perf_counter() - began_s

    def _apart(self, fresh: list[DraftedTokens]) -> tuple[list[DraftedTokens], list[DraftedTokens]]:
        """Those in the next step, and those that sit it out: they and their draft models take turns."""
        if self._model is None:
            return fresh, []
        self._model.exchange()
        parts: tuple[list[DraftedTokens], list[DraftedTokens]] = [], []
        for drafted in fresh:
            waits = self._model.waits(drafted.chunk.chunk_id)
            (pause if waits else resume)(drafted.request)
            parts[waits].append(drafted)
        return parts

    def _proposals(self, fresh: list[DraftedTokens], cost: StepCost) -> list[Proposal]:
        """Of each, group by group: one call of the index serves all samples of a group."""
        least = cost.least_chance(len(fresh)) if self._policy.by_worth else 0.0
        most, share = min(self._policy.max_draft_tokens, self._draft_tokens), min(1.0, ALL_EVIDENCE / len(fresh))
        proposals, by_group = [NOTHING] * len(fresh), defaultdict(list)
        for row, drafted in enumerate(fresh):
            guess = self._from_model(drafted, most)
            if len(guess.tokens):
                proposals[row] = guess
            elif self._indexed:
                by_group[drafted.group.ref].append(row)
        for rows in by_group.values():
            index = fresh[rows[0]].group.index
            plans = [fresh[row].chunk.draft for row in rows]
            sources = [EVIDENCE.get(plan.method, EVIDENCE[DraftMethod.GROUP]) for plan in plans]
            found = index.propose_for([plan.sample_index for plan in plans], most, 1, least, share, sources)
            for row, paths in zip(rows, found, strict=True):
                guess = paths[0] if paths else NOTHING
                proposals[row] = self._within(fresh[row], guess, most)
        return proposals

    def _within(self, drafted: DraftedTokens, guess: Proposal, most: int) -> Proposal:
        """What may be drafted of a guess for what follows all that the index knows of the sample."""
        index, sample_index = drafted.group.index, drafted.chunk.draft.sample_index
        if index.known(sample_index) > drafted.generated:  # a copy has made more, or a chunk that was lost
            known = index.ahead(sample_index, drafted.generated, most)
            guess = cut(behind(known, guess), most) if len(known) else NOTHING
        room = self._room(drafted)
        return guess if len(guess.tokens) <= room else cut(guess, max(0, room))

    def _room(self, drafted: DraftedTokens) -> int:
        """The last token of a chunk is the bonus token, and vLLM computes no position behind its context."""
        return min(drafted.until - drafted.generated, self._max_model_len - drafted.request.num_tokens) - 1

    def _from_model(self, drafted: DraftedTokens, most: int) -> Proposal:
        """What a draft model has sent, unless the index knows what comes (see `_within`)."""
        plan, index = drafted.chunk.draft, drafted.group.index
        if self._model is None or index.known(plan.sample_index) > drafted.generated:
            return NOTHING
        return cut(self._model.proposal(drafted.chunk.chunk_id), max(0, min(most, self._room(drafted))))

    def _branch(self, drafted: DraftedTokens, forks: list[Fork], budget: int) -> None:
        """Each fork catches up with what is known of the sample, and continues along a branch of its own."""
        if not forks:
            return
        index, sample_index = drafted.group.index, drafted.chunk.draft.sample_index
        branches = index.propose(sample_index, budget, 1 + max(fork.path for fork in forks))
        for fork in forks:
            known = index.ahead(sample_index, fork.generated, self._draft_tokens).tolist()
            branch = branches[fork.path].tokens.tolist() if fork.path < len(branches) else []
            room = min(drafted.until - fork.generated, self._max_model_len - fork.request.num_tokens) - 1
            fork.request.spec_token_ids = (known + branch)[: max(0, min(self._draft_tokens, room))]

    def _view(self, fresh: list[DraftedTokens], proposals: list[Proposal], cost) -> DraftView:
        count = len(fresh)
        right = np.zeros((count, max(1, *(len(p.tokens) for p in proposals))), np.float32)
        for row, proposal in zip(right, proposals, strict=True):
            row[: len(proposal.right)] = proposal.right
        plans = [drafted.chunk.draft for drafted in fresh]

        def column(values, kind=np.int32):
            return np.fromiter(values, kind, count)

        return DraftView(
            right=right,
            proposed=column(len(p.tokens) for p in proposals),
            match_tokens=column(p.match_tokens for p in proposals),
            slot=column((d.slot for d in fresh), np.int64),
            verifications=column((d.report.verifications - 1 for d in fresh), np.int64),
            drafted_last=column(len(d.draft.tokens) for d in fresh),
            accepted_last=column(d.accepted for d in fresh),
            generated=column(d.generated for d in fresh),
            expected=column(plan.expected_tokens for plan in plans),
            medium_at=column(plan.class_starts[0] for plan in plans),
            long_at=column(plan.class_starts[1] for plan in plans),
            acceptance=self._accepted / self._drafted,
            cost=cost,
        )

    @property
    def methods(self) -> tuple[str, ...]:
        """By which chunks can draft now (`DraftPlan.method`), first what one drafts by that names none."""
        model = (DraftMethod.MODEL,) if self._model is not None and self._model.reached else ()
        return model + (tuple(EVIDENCE) if self._indexed else ())

    def counts(self) -> dict[str, int]:
        """Since the start: tokens drafted and accepted by source, microseconds spent here; what the indexes hold."""
        now_s = time.monotonic()
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._sizes = {"index_tokens": self._groups.tokens, "index_bytes": self._groups.nbytes}
            self._sizes |= self._feed.counts() if self._feed is not None else {}
            if self._model is not None:
                self._model.tidy()
        model = self._model.counts() if self._model is not None else {}
        return dict(self._counts) | {"draft_us": int(self._spent_s * 1e6)} | self._sizes | model

    def step_cost(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """What a step costs by its tokens, as measured: (tokens, seconds); None before two sizes were seen."""
        cost = self._times.cost()
        return None if cost is None else (cost.tokens, cost.seconds)

    def stop(self) -> None:
        self._groups.close_all()
        if self._feed is not None:
            self._feed.close()
        if self._model is not None:
            self._model.stop()
