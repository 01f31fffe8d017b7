"""The simulation's worlds: each of them finds the defect that it is for."""

import asyncio
from types import SimpleNamespace

import pytest

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import RolloutRejected
from tailrace.deployments.batches import quotas
from tailrace.deployments.batches.deliveries import Deliveries, Delivery
from tailrace.deployments.batches.quotas import Quotas
from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RolloutBatch, WeightsLoaded
from tailrace.deployments.telemetry import Telemetry
from tailrace.lab.fuzz.campaign import outcome_of
from tailrace.lab.fuzz.run import SINGLES_SHARE, plan_of
from tailrace.lab.fuzz.worlds.plan import ALWAYS, WORLDS
from tailrace.policies.core import rollout as core_module
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.wait_queue import WaitQueue
from tailrace.policies.families.fairness import FairShares
from tailrace.policies.protocol.actions import SampleEnd
from tailrace.policies.protocol.events import SampleReturned


def growing_batches_that_count_twice(monkeypatch):
    refusal = Deliveries.quota_refusal

    def counts_all(self, subject, load, whole, besides=""):
        return refusal(self, subject, load, whole)

    monkeypatch.setattr(Deliveries, "quota_refusal", counts_all)


def quotas_that_are_exceeded_by_one(monkeypatch):
    excess = quotas._excess
    monkeypatch.setattr(quotas, "_excess", lambda *of, bound=None: excess(*of[:-1], of[-1] and of[-1] + 1))


def shares_that_do_not_count(monkeypatch):
    monkeypatch.setattr(FairShares, "key", lambda self, batch: (-batch.priority, batch.running_tokens))


def one_start_a_tick(monkeypatch):
    """The queue of samples that may run anywhere gives one in a decision."""
    take_first, ticks = WaitQueue.take_first, {}

    def take_one(self, home, room_tokens):
        now = asyncio.get_running_loop().time()
        if home is None and ticks.get(self) == now:
            return None
        ticks[self] = now
        return take_first(self, home, room_tokens)

    monkeypatch.setattr(WaitQueue, "take_first", take_one)


def priorities_that_do_not_count(monkeypatch):
    monkeypatch.setattr(FairShares, "key", lambda self, batch: (0, batch.running_tokens / batch.share))


def batches_that_cannot_grow(monkeypatch):
    refusal = Delivery.refusal

    def refuse(self, message, driver, now_s):
        reason = f"{message.batch_id} runs already"
        return Rejected(reason=reason) if self.adds(message) else refusal(self, message, driver, now_s)

    monkeypatch.setattr(Delivery, "refusal", refuse)


def turns_that_are_given_up(monkeypatch):
    """Each second turn ends as failed, though nothing has happened."""
    returned = RolloutCore._returned

    def give_up(self, event):
        returned(self, event)
        self._end(self.sample(event.sample_id), SampleEnd.FAILED, "no reason", "no reason")

    monkeypatch.setitem(core_module._HANDLERS, SampleReturned, give_up)


SEEDS = {
    ("quotas",): (10, 21),
    ("quotas", "grown"): (1, 20),
    ("scarce",): (14, 17),
    ("early",): (1, 4, 5),
    ("turns",): (0, 1),
    ("overtaking",): (1, 6),
    ("overtaking", "kill", "coordinator", "orders"): (2,),
    ("races", "scarce"): (14,),
    ("races", "kill", "damaged", "ray_error"): (6,),
    ("rewards",): (0, 1),
    ("lanes",): (0,),
    ("lanes", "scarce", "kill", "join"): (2, 3),
    ("finish", "scarce", "overtaking", "kill", "join"): (0, 1),
    ("finish", "coordinator", "overtaking"): (124, 139),
    ("turns", "trajectories", "scarce"): (1, 4),
}
"""By the kinds of a run, seeds that find the defects planted in `tests/planted/defects`."""


def in_every_seed(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Returns these kinds, whose worlds each seed has."""
    return (*kinds, *(world + ALWAYS for world in filter(WORLDS.get, kinds)))


@pytest.mark.parametrize("kinds", SEEDS, ids=",".join)
def test_no_seed_of_a_world_fails(kinds):
    singles = 1.0 if kinds == ("quotas",) else SINGLES_SHARE
    outcomes = [outcome_of(seed, in_every_seed(kinds), singles) for seed in SEEDS[kinds]]
    assert [outcome.problem for outcome in outcomes] == [None] * len(outcomes)
    assert all(outcome.samples for outcome in outcomes)


def test_every_world_has_a_seed_here():
    assert set(WORLDS) <= {kind for kinds in SEEDS for kind in kinds}


@pytest.mark.parametrize(
    ("broken", "kinds", "first", "problem"),
    [
        (growing_batches_that_count_twice, ("quotas", "grown"), 0, "was refused below its quota"),
        (quotas_that_are_exceeded_by_one, ("quotas",), 27, "are in flight, quotas.max_"),
        (priorities_that_do_not_count, ("scarce",), 17, "began, of turn"),
        (shares_that_do_not_count, ("scarce",), 11, "began, of turn"),
        (one_start_a_tick, ("scarce",), 0, "of KV, "),
        (batches_that_cannot_grow, ("grown",), 0, "was refused as it grew: d"),
        (turns_that_are_given_up, ("turns",), 0, "given up: no reason"),
    ],
)
def test_a_world_finds_the_defect(monkeypatch, broken, kinds, first, problem):
    broken(monkeypatch)
    problems = (outcome_of(seed, in_every_seed(kinds)).problem for seed in range(first, first + 40))
    assert problem in next(filter(None, problems))


def test_a_world_changes_no_other_choice_of_a_seed():
    for seed in range(40):
        plain, quotas_too = plan_of(seed, ("kill", "hasty")), plan_of(seed, ("kill", "hasty", "quotas"))
        assert (plain.drivers, plain.faults, plain.odd) == (quotas_too.drivers, quotas_too.faults, quotas_too.odd)
    assert Quotas(**plan_of(3, ("quotas",)).worlds.bounds(8, 800)).max_samples in (None, 8, 10, 16)


class LateAnswers:
    """A service that answers each update once its event is set, and keeps the batch that it gets."""

    def __init__(self):
        self.events: dict[int, asyncio.Event] = {}
        self.batch = None
        self.update_weights = SimpleNamespace(remote=self._update)
        self.rollout = SimpleNamespace(remote=self._rollout)

    def options(self, stream: bool):
        return self

    async def _update(self, role, version, source, digest):
        await self.events.setdefault(version, asyncio.Event()).wait()
        return WeightsLoaded(version=version, digest="d", replicas=())

    def _rollout(self, role, batch, driver, have, cancelled):
        self.batch = batch
        raise RolloutRejected("it has been kept")


def test_an_earlier_update_that_is_answered_later_does_not_lower_the_bound_of_batches():
    async def story():
        service = LateAnswers()
        beats = SimpleNamespace(stop=lambda: None)
        client = RolloutClient(telemetry=Telemetry("test"), handle=service, heartbeat=lambda beat: beats)
        updates = [asyncio.ensure_future(client.update_weights(version, f"w{version}")) for version in (1, 2)]
        await asyncio.sleep(0)
        for version in (2, 1):
            service.events[version].set()
            await updates[version - 1]
        group = PromptGroup(prompt_id="p", token_ids=(1,))
        with pytest.raises(RolloutRejected, match="kept"):
            await anext(client.rollout(RolloutBatch(batch_id="b", groups=(group,))))
        assert service.batch.min_weights_version == 2

    asyncio.run(story())
