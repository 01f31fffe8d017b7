"""The drafts of one engine: tokens are added to their group's index, and proposals are made from it.

A policy decides the length of each draft. The tokens that a draft model has sent in time are joined with the index's
proposal in a tree, of which the request verifies the best path; so are those of vLLM's own drafter. Runs next to vLLM's
scheduler, on the engine's thread, between two steps. Tokens set as a request's `spec_token_ids` are verified in the
next step. Invariant: nothing here waits or changes a token (the exact sampler verifies by equality). A request gets no
more drafts than vLLM will verify, so the counted drafts are the verified ones.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tailrace.deployments.draft_index.group_index import warm_up
from tailrace.deployments.draft_index.proposal import NOTHING, Proposal
from tailrace.deployments.drafting.drafted_tokens import DraftedTokens
from tailrace.deployments.drafting.group_indexes import GroupIndexes
from tailrace.deployments.drafting.proposal_batch import ProposalBatch
from tailrace.deployments.drafting.views import view_of
from tailrace.deployments.drafting.vllm_proposals import VllmProposals
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import Source
from tailrace.deployments.messages.drafts import EVIDENCE, DraftReport
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.deployments.vllm_exact.pause import pause, resume
from tailrace.policies.models.performance_estimator import PerformanceEstimator
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.performance import count_tested
from tailrace.policies.protocol.step_cost import StepCost

if TYPE_CHECKING:  # the feed imports Ray, which nothing else here needs
    from tailrace.deployments.context.context_client import ContextClient
    from tailrace.deployments.drafter.client import Drafters

ALL_EVIDENCE = 8
"""Maximum number of samples in a step for which each is drafted with all its evidence, after every step.

With 64 samples, each uses an eighth of its evidence. By `bench budgets` that costs 0.7 % of the throughput and saves
half of the drafting time.
"""

LOOK_S = 0.25
"""Seconds between two measurements of the indexes: there can be thousands, and the engine reports after every step."""

ASK_S, ASK_SAMPLE_S = 5e-4, 2e-5
"""Seconds of a proposal from the index, per step and per sample: drafts that miss, `bench overhead` on a busy core."""

FUTILE_SHARE, FUTILE_S, FUTILE_STEPS = 0.02, 1e-3, 8
"""Limits on attempts whose drafts do not pay: roughly, their maximum share of step time, their maximum seconds per
step, and the maximum number of steps between two of them.
"""

NO_MODEL = DraftMode(0, True)
"""Mode of chunks that draft from a part of the index: they have no drafter, and wait for none."""


class EngineDrafts:
    """The drafts of one engine. `model`: draft models.

    `feed`: supplies tokens of mates on other engines. Without it, only this engine's own samples are known.
    """

    def __init__(
        self,
        config: DraftConfig,
        max_model_len: int,
        feed: ContextClient | None,
        model: Drafters | None = None,
        vocabulary: int = 1 << 31,
        vllm: VllmProposals | None = None,
    ):
        """`vocabulary`: number of tokens; drafts hold no others. `vllm`: the proposals of vLLM's own drafter."""
        self._draft_tokens, self._max_model_len = config.draft_tokens, max_model_len
        self._indexed = config.method == "group"
        self._groups, self._feed, self._model = GroupIndexes(config, feed, vocabulary), feed, model
        self._running: dict[str, DraftedTokens] = {}  # by chunk id
        self._fresh: list[DraftedTokens] = []  # those with new tokens in this step
        self._steps, self._free = 0, []
        self._policy = self._memory = None
        self.performance = PerformanceEstimator()  # shared with the engine, which records steps in it
        if model is not None:
            model.performance = self.performance
        self._counts: Counter[str] = Counter()
        self._spent_s, self._now_s, self._sizes, self._looked_s = 0.0, 0.0, {}, -LOOK_S
        self.vllm = vllm or VllmProposals()
        self.vllm.acceptance = self.performance.acceptance
        warm_up()

    # ---- calls of the stepper ----------------------------------------------------------------------

    def open(self, chunk: ChunkRequest, request) -> None:
        """Adds a chunk; a chunk without a plan does not draft."""
        plan = chunk.draft
        if plan is None:
            return
        prompt, answer = chunk.token_ids[: chunk.prompt_tokens], chunk.token_ids[chunk.prompt_tokens :]
        group = self._groups.open(plan.group, plan.epoch, prompt)
        if chunk.prompt_tokens < chunk.answer_start == len(chunk.token_ids):
            group.index.interrupt(plan.sample_index)  # a turn begins: the last tokens came from outside
        group.index.extend(plan.sample_index, 0, answer)
        slot = self._free.pop() if self._free else len(self._running)
        method = plan.method if plan.method in EVIDENCE else DraftMethod.GROUP
        self._running[chunk.chunk_id] = DraftedTokens(
            chunk=chunk,
            request=request,
            group=group,
            slot=slot,
            method=method,
            evidence=EVIDENCE[method],
            generated=len(answer),
            until=len(answer) + chunk.max_tokens,
        )
        if self._model is not None:
            self._model.open(chunk, NO_MODEL if plan.method in EVIDENCE else plan.way)
        if plan.policy != self._policy:
            self._policy, self._memory = plan.policy, None

    def replace(self, chunk_id: str, request) -> None:
        """Replaces a chunk's request by the one that continues it: vLLM has ended the one before."""
        if (drafted := self._running.get(chunk_id)) is not None:
            drafted.request, drafted.proposed = request, []

    def restart(self, chunk_id: str, request, answer: list[int]) -> None:
        """Replaces a chunk's request after a step that raised. `answer`: the sample's tokens so far."""
        if (drafted := self._running.get(chunk_id)) is None:
            return
        drafted.request, drafted.draft, drafted.sources, drafted.proposed = request, [], b"", []
        self._fresh = [other for other in self._fresh if other is not drafted]
        if missed := answer[drafted.generated :]:
            drafted.generated += len(missed)
            drafted.unread += missed
            if self._model is not None:
                self._model.made(chunk_id, missed)

    def settle(self) -> None:
        """Waits for the histories of open groups. Only for replays on a modelled clock and for checks of an engine."""
        self._groups.settle()

    def made_by(self, made: Iterable[tuple[str, list[int]]]) -> None:
        """Records the tokens that a step has emitted for each chunk: the accepted part of its draft, and one more."""
        began_s, self._now_s = time.perf_counter(), time.monotonic()
        running, fresh, model = self._running, self._fresh, self._model
        tests: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for chunk_id, tokens in made:
            drafted = running.get(chunk_id)
            if drafted is None or not tokens:
                continue
            drafted.generated += len(tokens)
            drafted.unread += tokens
            drafted.verifications += 1
            drafted.accepted = 0
            if model is not None:
                model.made(chunk_id, tokens)
            if drafted.proposed:
                self.vllm.count(drafted, tokens, tests[DraftMethod.VLLM])
            if drafted.draft:
                self._count(drafted, tokens, tests)
            fresh.append(drafted)
        for method, (right, tested, verifications) in tests.items():
            self.performance.acceptance.count(method, right, tested, self._now_s, verifications)
        self._spent_s += time.perf_counter() - began_s

    def _count(self, drafted: DraftedTokens, tokens: list[int], tests: dict[str, list[int]]) -> None:
        """Counts the accepted tokens of a chunk's draft. `tokens`: those that its verification has emitted.

        `tests`: counts of this step, by method: right tokens, tested tokens and verifications. Drafts of a draft model,
        and of vLLM's drafter, are counted with the overtaken ones.
        """
        accepted = drafted.count(tokens)
        if drafted.sources[0] not in (Source.MODEL, Source.VLLM):
            for place, number in enumerate((accepted, count_tested(accepted, len(drafted.draft)), 1)):
                tests[drafted.method][place] += number

    def close(self, chunk_id: str, goes_on: bool = False, accepted: int = 0) -> DraftReport | None:
        """Ends a chunk. Returns its report, or None if it had no plan. `goes_on`: its sample may continue here.
        `accepted`: right tokens of all its drafts, by the records.
        """
        drafted = self._running.pop(chunk_id, None)
        if drafted is None:
            return None
        self._read_all([drafted])
        self._groups.close(drafted.group)
        report = drafted.report(self._draft_tokens, accepted)
        if self._model is not None:
            report.model_tested, report.model_accepted = self._model.close(chunk_id, goes_on)
        self._free.append(drafted.slot)
        for source in Source:
            self._counts[f"drafted.{source.name.lower()}"] += int(report.drafted[source])
            self._counts[f"accepted.{source.name.lower()}"] += int(report.accepted[source])
        return report

    # ---- proposals ---------------------------------------------------------------------------------

    def _read_all(self, wanted: Iterable[DraftedTokens]) -> None:
        """Extends the indexes to these chunks' last tokens, group by group, and sends them to mates elsewhere."""
        by_group = defaultdict(list)
        for drafted in wanted:
            if drafted.unread:
                by_group[id(drafted.group)].append(drafted)
        for some in by_group.values():
            samples = [drafted.chunk.draft.sample_index for drafted in some]
            unread = [drafted.unread for drafted in some]
            starts = [drafted.generated - len(drafted.unread) for drafted in some]
            some[0].group.index.extend_all(samples, starts, unread)
            for drafted in some:
                drafted.unread = []
            if self._feed is not None:
                ref = some[0].chunk.draft.group
                for sample, start, tokens in zip(samples, starts, unread, strict=True):
                    self._feed.append(ref, sample, start, tokens)

    def propose(self, in_flight: Mapping[str, list[int]] | None = None) -> bool:
        """Sets the next draft on each continuing request, after a step. Returns whether the next step must wait for it.

        `in_flight`: drafts of the next step by request, if it computes already. Then it returns whether one would pay.
        """
        began_s = time.perf_counter()
        fresh, self._fresh = self._fresh, []
        cost = self.performance.steps.cost(len(fresh))
        self._steps += 1
        due = self._model is not None or self.vllm.on or self.vllm.ran or self._is_due(len(fresh), cost)
        drafts = due or bool(in_flight) or not all([drafted.futile for drafted in fresh])
        waits = drafts and self._draft(fresh, cost, due, in_flight is not None)
        if in_flight is not None or not drafts:
            verified = in_flight or {}
            for drafted in fresh:
                if verified or drafted.draft:
                    drafted.is_verified_next(verified.get(drafted.request.request_id, ()))
        self._spent_s += time.perf_counter() - began_s
        return waits

    def _is_due(self, running: int, cost: StepCost | None) -> bool:
        """Returns whether drafts are proposed after this step for all samples, or only for those whose drafts pay."""
        if cost is None or running <= ALL_EVIDENCE:
            return True
        asking_s, step_s = ASK_S + ASK_SAMPLE_S * running, float(cost.at(running))
        allowed_s = min(FUTILE_S, FUTILE_SHARE * step_s)
        return self._steps % min(FUTILE_STEPS, 1 + int(asking_s / allowed_s)) == 0

    def _draft(self, fresh: list[DraftedTokens], cost: StepCost | None, due: bool, ahead: bool) -> bool:
        """Runs `propose` for chunks with new tokens; unless `due`, where drafts pay. `ahead`: a step is in flight."""
        fresh = [drafted for drafted in fresh if drafted.chunk.chunk_id in self._running]
        groups = {id(drafted.group) for drafted in fresh if not drafted.futile}
        self._read_all(drafted for drafted in self._running.values() if due or id(drafted.group) in groups)
        self._groups.receive()
        self.vllm.take(fresh, ahead)
        fresh, waiting = self._apart(fresh, ahead)
        self._fresh = [] if ahead else waiting
        if not fresh or cost is None or not self._policy.max_draft_tokens:
            for drafted in fresh:
                drafted.draft, drafted.sources = [], b""
            if fresh or not self._running:
                self.vllm.rest()
            return bool(waiting) or self.vllm.must_wait
        batch = self._proposals(fresh, cost, due)
        decide = partial(self._budgets, fresh, cost, self._memory)
        budgets, self._memory = decide(batch)
        batch, budgets = self.vllm.weigh(fresh, batch, budgets, cost if self._policy.by_worth else None, decide, ahead)
        tokens, sources, width = batch.tokens.tolist(), batch.sources.tobytes(), batch.sources.shape[1]
        for row, (drafted, budget) in enumerate(zip(fresh, budgets.tolist(), strict=True)):
            drafted.futile, at = not budget, row * width
            if not ahead:
                drafted.draft, drafted.sources = tokens[row][:budget], sources[at : at + budget]
                drafted.request.spec_token_ids = tokens[row][:budget]
        return bool(waiting or (budgets.any() and not self.vllm.suffices)) or self.vllm.must_wait

    def _budgets(self, fresh: list[DraftedTokens], cost: StepCost, memory, batch: ProposalBatch):
        batch.cut(np.array([self._room(drafted) for drafted in fresh]))
        view = view_of(fresh, batch, cost, self.performance.acceptance.overall(self._now_s))
        return self._policy.decide(view, memory)

    def _apart(self, fresh: list[DraftedTokens], ahead: bool) -> tuple[list[DraftedTokens], list[DraftedTokens]]:
        """Returns chunks in the next step, and those that skip it, if it waits, for their draft models."""
        if self._model is None:
            return fresh, []
        self._model.exchange()
        parts: tuple[list[DraftedTokens], list[DraftedTokens]] = [], []
        for drafted in fresh:
            waits = self._model.waits(drafted.chunk.chunk_id)
            if not ahead:
                (pause if waits else resume)(drafted.request)
            parts[waits].append(drafted)
        return parts

    def _proposals(self, fresh: list[DraftedTokens], cost: StepCost, due: bool) -> ProposalBatch:
        """Returns each chunk's proposal, group by group: one call of the index serves all samples of a group.

        Unless all are due, chunks whose last proposal did not pay get nothing.
        """
        least = cost.least_chance(len(fresh)) if self._policy.by_worth else 0.0
        most, share = min(self._policy.max_draft_tokens, self._draft_tokens), min(1.0, ALL_EVIDENCE / len(fresh))
        batch, by_group, guesses = ProposalBatch(len(fresh), most), defaultdict(list), {}
        for row, drafted in enumerate(fresh):
            if drafted.futile and not due:
                continue
            if self._model is not None and len((guess := self._from_model(drafted, most)).tokens):
                guesses[row] = guess
            if self._indexed and (row not in guesses or drafted.chunk.draft.method is None):
                by_group[id(drafted.group)].append(row)
        for rows in by_group.values():
            index, some = fresh[rows[0]].group.index, [fresh[row] for row in rows]
            samples = [drafted.chunk.draft.sample_index for drafted in some]
            batch.fill(rows, index.draft_rows(samples, most, 1, least, share, [drafted.evidence for drafted in some]))
            known = index.known_all(samples)
            for place in np.flatnonzero(known > [drafted.generated for drafted in some]).tolist():
                batch.put(rows[place], self._ahead(some[place], batch.get(rows[place]), most))
        for row, guess in guesses.items():
            batch.put(row, guess.joined(batch.get(row)).first(most))
        self.vllm.join(batch, fresh)
        return batch

    def _ahead(self, drafted: DraftedTokens, guess: Proposal, most: int) -> Proposal:
        """Returns the tokens that a lost chunk had already made, followed by the guess."""
        known = drafted.group.index.ahead(drafted.chunk.draft.sample_index, drafted.generated, most)
        return guess.after(known).first(most) if len(known) else NOTHING

    def _room(self, drafted: DraftedTokens) -> int:
        """Returns the maximum number of draft tokens of a chunk.

        The last token of a chunk is the bonus token, and vLLM computes no position after its context.
        """
        return min(drafted.until - drafted.generated, self._max_model_len - drafted.request.num_tokens) - 1

    def _from_model(self, drafted: DraftedTokens, most: int) -> Proposal:
        """Returns the draft model's tokens; none if the index knows the next ones, of a lost chunk."""
        plan, index = drafted.chunk.draft, drafted.group.index
        if index.known(plan.sample_index) > drafted.generated:
            return NOTHING
        return self._model.proposal(drafted.chunk.chunk_id).first(max(0, min(most, self._room(drafted))))

    @property
    def methods(self) -> tuple[str, ...]:
        """Draft methods available now (`DraftPlan.method`); the first is the default of plans without a method."""
        model = (DraftMethod.MODEL,) if self._model is not None and self._model.reached else ()
        return model + (tuple(EVIDENCE) if self._indexed else ()) + self.vllm.methods

    def counts(self) -> dict[str, int]:
        """Returns drafted and accepted tokens by source, microseconds spent (since the start), and index sizes."""
        now_s = time.monotonic()
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._sizes = {"index_tokens": self._groups.tokens, "index_bytes": self._groups.nbytes}
            self._sizes |= self._feed.counts() if self._feed is not None else {}
            if self._model is not None:
                self._model.tidy()
        model = self._model.counts() if self._model is not None else {}
        return dict(self._counts) | {"draft_us": int(self._spent_s * 1e6)} | self._sizes | model

    def stop(self) -> None:
        self._groups.close_all()
        if self._feed is not None:
            self._feed.close()
        if self._model is not None:
            self._model.stop()
