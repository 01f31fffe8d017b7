"""An account of everything in flight at one coordinator, by its calls alone, and the laws of its quotas.

Laws: samples of the core never exceed the quotas, and nothing is refused that would fit beside everything that may be
in flight. A call counts from its arrival until its end; a sample whose caller has left counts for LEFT_S more.
`AccountedCoordinator` replaces the coordinator for its drivers. Called by `SimulatedCluster`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from tailrace.deployments.batches.quotas import BatchLoad, Quotas
from tailrace.deployments.coordinator.rollouts import Rollouts
from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RejectedBy, RolloutBatch, checked
from tailrace.deployments.messages.session import SampleRequest
from tailrace.policies.core.sample_states import RUNNING, WAITING

LEFT_S = 3.0
"""Seconds for which a sample whose caller has left may be in flight without being in the core."""


@dataclass
class _Asked:
    """A requested batch: its groups so far, and those of each open call. Or a requested sample: one group, and the time
    at which its last call ended."""

    groups: dict[str, PromptGroup] = field(default_factory=dict)
    calls: dict[object, dict[str, PromptGroup]] = field(default_factory=dict)
    left_s: float = 0.0

    def most(self) -> BatchLoad:
        every = dict(self.groups)
        for groups in self.calls.values():
            every |= groups
        return BatchLoad.of(tuple(every.values()))


class QuotaAccount:
    """The account. `defects`: defects of the run, to which a breach is added."""

    def __init__(self, quotas: Quotas, rollouts: Rollouts, defects: list[str]):
        self._quotas, self._rollouts, self._defects = quotas, rollouts, defects
        self._asked: dict[tuple, _Asked] = {}  # by batch id, or by session, group, index and turn
        self._now = asyncio.get_running_loop().time

    @contextmanager
    def of(self, name: tuple, groups: dict[str, PromptGroup]) -> Iterator["OpenCall"]:
        """Counts one call while it is open."""
        asked, call = self._asked.setdefault(name, _Asked()), OpenCall(self, name, groups)
        asked.calls[call] = groups
        try:
            yield call
        finally:
            del asked.calls[call]
            if not call.was_refused:
                asked.groups |= groups
            asked.left_s = self._now()
            if not asked.calls and (len(name) == 1 or call.was_answered):
                self._asked.pop(name, None)

    def refused(self, name: tuple, groups: dict[str, PromptGroup], reason: str) -> None:
        """Checks that a call which the service has refused by its quotas does not fit."""
        load, others = BatchLoad.of(tuple(groups.values())), self._others(name)
        bounds = {"samples": self._quotas.max_samples, "tokens": self._quotas.max_tokens}
        fits = all(
            bound is None or getattr(load, kind) + getattr(others, kind) <= bound for kind, bound in bounds.items()
        )
        if fits and not self._rollouts.status().at_admission:
            self._defects.append(f"{name} was refused below its quota, with {others[:2]} in flight at most: {reason}")

    def _others(self, name: tuple) -> BatchLoad:
        """Returns the load of everything else that may be in flight."""
        now = self._now()
        for other, asked in list(self._asked.items()):
            if not asked.calls and now > asked.left_s + LEFT_S:
                del self._asked[other]
        loads = [asked.most() for other, asked in self._asked.items() if other != name]
        for sample in self._in_core():
            if sample.cancelled and sample.group.batch.forgets:  # of a session, and its caller has left
                loads.append(BatchLoad(1, sample.max_tokens))
        return BatchLoad(sum(load.samples for load in loads), sum(load.tokens for load in loads))

    def _in_core(self) -> list:
        core = self._rollouts.core_holder.present
        return [sample for sample in core.samples() if sample.state in (WAITING, RUNNING)]

    def problem(self) -> str | None:
        """Returns by how much the core's samples exceed a quota, or None. Samples of closed batches are left out: they
        are about to end."""
        found: dict[tuple[str, str], int] = {}
        for sample in self._in_core():
            batch_id, _, name = sample.sample_id.partition("/")
            asked, is_of_session = batch_id.rpartition("~")[0], sample.group.batch.forgets
            if not sample.cancelled and (is_of_session or (asked,) in self._asked):
                made = sample.generated_tokens if is_of_session else 0  # in earlier turns, perhaps
                found[asked, name] = sample.max_tokens - made  # a batch that is asked for again may be here twice
        sums = {"samples": len(found), "tokens": sum(found.values())}
        bounds = {"samples": self._quotas.max_samples, "tokens": self._quotas.max_tokens}
        for kind, bound in bounds.items():
            if bound is not None and sums[kind] > bound:
                return f"{sums[kind]} {kind} are in flight, quotas.max_{kind} is {bound}"
        return None


class OpenCall:
    """One call, until it ends. `take` gets each of its items."""

    def __init__(self, account: QuotaAccount, name: tuple, groups: dict[str, PromptGroup]):
        self._account, self._name, self._groups = account, name, groups
        self.was_refused = self.was_answered = False

    def take(self, item: object) -> None:
        self.was_answered = True
        if isinstance(item, Rejected) and item.by is not RejectedBy.READER:
            self.was_refused = True
            if item.by is RejectedBy.QUOTA:
                self._account.refused(self._name, self._groups, item.reason)


class AccountedCoordinator:
    """A coordinator whose calls are counted."""

    def __init__(self, coordinator, account: QuotaAccount):
        self._coordinator, self._account = coordinator, account

    def __getattr__(self, name: str):
        return getattr(self._coordinator, name)

    async def rollout(self, role, message, driver, have, cancelled=False) -> AsyncIterator:
        return self._rolled_out(role, message, driver, have, cancelled)

    async def _rolled_out(self, role, message, driver, have, cancelled) -> AsyncIterator:
        known = checked(RolloutBatch, message)
        named = () if isinstance(known, Rejected) else known.groups
        with self._account.of((getattr(known, "batch_id", None),), {one.prompt_id: one for one in named}) as call:
            async with aclosing(await self._coordinator.rollout(role, message, driver, have, cancelled)) as items:
                async for item in items:
                    call.take(item)
                    yield item

    async def generate(self, role, settings, request):
        with self._of_sample(settings, request) as call:
            answer = await self._coordinator.generate(role, settings, request)
            call.take(answer)
            return answer

    async def stream_sample(self, role, settings, request) -> AsyncIterator:
        return self._streamed(role, settings, request)

    async def _streamed(self, role, settings, request) -> AsyncIterator:
        with self._of_sample(settings, request) as call:
            async with aclosing(await self._coordinator.stream_sample(role, settings, request)) as items:
                async for item in items:
                    if isinstance(item, Rejected) or item.answer is not None:
                        call.take(item)
                    yield item

    def _of_sample(self, settings, request):
        known = checked(SampleRequest, request)
        if isinstance(known, Rejected):
            return self._account.of(("impossible", id(request)), {})
        name = settings.batch_id, known.group, known.index, known.turn
        return self._account.of(name, {known.group.prompt_id: known.group})
