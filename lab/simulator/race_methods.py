"""Races in a simulation, and the drafts of copies: a paper's draft methods as Fastest-of-N's ladder.

`policies.core.races` decides, in the core; this gives its policy's knowledge: how much faster a method makes a sample
that runs alone, by its table and the replica's step, and up to how many chunks a replica takes copies. Acceptance is
the chance that a tested draft token is right, as replicas report it. Invariant: ladders know tables and means, but no
odds of single samples. Called by the systems that race.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from tailrace.lab.simulator.acceptance import ModelledMethod
from tailrace.lab.simulator.chunks import SimulatedChunk
from tailrace.lab.simulator.decoupled import PLAIN, DraftSetup, Odds, best_way, drafts_s
from tailrace.lab.simulator.scenario import Scenario
from tailrace.lab.simulator.speculation import CHANGES, Pace, Speculation
from tailrace.lab.simulator.types import ReplicaModel
from tailrace.policies.families.racing import FastestOfN, MethodProfile
from tailrace.policies.models.spec_cost_model import VerifierCost
from tailrace.policies.protocol.performance import MethodAcceptance

RACE_SHARE = 0.25
"""Assumed, since no b_max is published: copies may lengthen a step by this share of its own time."""

PLAIN_RUNG = MethodProfile(PLAIN, ((0.0, 1.0),), (0.0,))

RATES = [n / 20 for n in range(21)]


class RaceMethods(NamedTuple):
    """`policy`: for the core; `own`: the method of chunks that are no copies; `ways`: of copies, by method."""

    policy: FastestOfN
    own: str
    ways: dict[str, DraftSetup]


def race_methods_of(
    scenario: Scenario, model: ReplicaModel, own: str | None, mates: int = 0, ahead: bool = True
) -> RaceMethods:
    """Returns the methods of the scenario on replicas of `model`. Chunks that are no copies draft by the method `own`,
    with this many mates' tokens to draft from, or plainly if None. `ahead`: there is a drafter beside; else drafts come
    in turn. Methods of which not even one copy fits beside others race on idle replicas, with room for one.
    """
    verifier, longest = verifier_of(scenario, model), scenario.prompt_tokens.value + scenario.max_tokens.value
    methods = {method.name: method for method in scenario.drafting()}
    ways = {name: best_way(m, mean_chance(m), verifier, 1, ahead)[0] for name, m in methods.items()}
    rooms = {name: _room(way, verifier, ahead) for name, way in ways.items() if name != own}
    able = {name: room for name, room in rooms.items() if room} or dict.fromkeys(rooms, 1)
    rungs = [] if own else [PLAIN_RUNG]
    for name in (name for name in methods if name == own or name in able):
        rungs.append(_rung(methods[name], mates if name == own else 0, verifier, ahead))
    own = own or PLAIN
    usual = next(rung.mean_acceptance() for rung in rungs if rung.method == own)
    room = min(*able.values(), model.kv_capacity_tokens // longest)
    policy = FastestOfN(room=room, usual=usual, rungs=tuple(rungs))
    return RaceMethods(policy, own, {name: ways[name] for name in able})


def _room(way: DraftSetup, verifier: VerifierCost, ahead: bool) -> int:
    """Returns the number of copies that lengthen a step by RACE_SHARE of its own time: by their verified tokens and,
    without a drafter in parallel, by the time to draft them.
    """
    waits = 0 if ahead else way.window
    base_s, copy_s = waits * way.method.base_s, waits * way.method.token_s
    return max(0, int((RACE_SHARE * verifier.base_s - base_s) / ((1 + way.window) * verifier.token_s + copy_s)))


def _rung(method: ModelledMethod, mates: int, verifier: VerifierCost, ahead: bool) -> MethodProfile:
    """Returns the method's profile for a sample that runs alone."""
    plain_s = verifier.seconds(1, 0)
    curve = tuple((p, best_way(method, p, verifier, 1, ahead)[1] * plain_s) for p in RATES)
    return MethodProfile(method.name, curve, (mean_chance(method, mates),))


def verifier_of(scenario: Scenario, model: ReplicaModel) -> VerifierCost:
    """Returns a step of the replica at the context that samples have on average: the prompt and half of a mean
    answer.
    """
    context = scenario.prompt_tokens.value + scenario.law().mean() / 2
    return VerifierCost(model.gpus, model.step.context_s * context, model.step.token_s, model.step.base_s)


def mean_chance(method: ModelledMethod, mates: int = 0) -> float:
    """Returns the chance that a draft token is right, as profiled: of the average sample with this many mates."""
    return method.acceptance.mean_chance(mates)


class RacingSpeculation:
    """The `Speculation` of a replica whose own chunks draft by `own`, called `name`, and copies in turn with it by the
    way of their method: first each draft model over all of its copies, then one step for all."""

    def __init__(self, own: Speculation, name: str, ways: Mapping[str, DraftSetup], odds: Odds):
        self._own, self._ways, self._odds = own, ways, odds
        self.methods = (name, *ways)
        self.most = max(own.most, *(way.window for way in ways.values()))

    def stale(self, changes: int, running: int) -> bool:
        return changes * CHANGES > running

    def drop(self, chunk: SimulatedChunk) -> None:
        if chunk.method is None:
            self._own.drop(chunk)

    def acceptance(self) -> tuple[MethodAcceptance, ...]:
        own = self._own.acceptance()
        return tuple(replace(one, method=self.methods[0]) for one in own)

    def pace(self, chunks: list[SimulatedChunk], context_tokens: float) -> Pace:
        own = [chunk for chunk in chunks if chunk.method is None]
        if len(own) == len(chunks):
            return self._own.pace(chunks, context_tokens)
        pace = self._own.pace(own, context_tokens) if own else Pace([], [])
        rates, costs, tested = iter(pace.rates), iter(pace.costs), iter(pace.tested or [0.0] * len(own))
        ways = [self._ways[chunk.method] for chunk in chunks if chunk.method is not None]
        made, computed, tests = [], [], []
        for chunk in chunks:
            if chunk.method is None:
                rate, cost, of_step = next(rates), next(costs), next(tested)
            else:
                way = self._ways[chunk.method]
                rate, cost, _ = way.shares(self._odds.of(way.method, chunk.sample), turns=False)
                of_step = 0.0  # a copy's drafts are not its sample's
            made.append(rate)
            computed.append(cost)
            tests.append(of_step)
        return Pace(made, computed, pace.floor_s, pace.steps, pace.added_s + drafts_s(ways), tested=tests)
