"""The systems that simulations compare, by name: their policies, sources of drafts and admission.

A system is the service's policy objects with a paper's choices, or ours; nothing in it is a model. The baseline is
`verl`: whole groups bound to replicas up front, samples in one piece, vLLM's own queue and preemption. Invariant:
`reveal` is for the oracle alone. Called by `tailrace simulate` and by benchmarks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Literal

from tailrace.lab.simulator.acceptance import BestOf, Chances, ModelledMethod
from tailrace.lab.simulator.bounds import bounds
from tailrace.lab.simulator.decoupled import Odds
from tailrace.lab.simulator.hardware import replica_model
from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.race_methods import RaceMethods, RacingSpeculation, race_methods_of
from tailrace.lab.simulator.report import account
from tailrace.lab.simulator.scenario import Scenario
from tailrace.lab.simulator.speculation import Speculation, by_policy
from tailrace.lab.simulator.types import Cluster, SimulatedRun, Workload, WorkloadGroup
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies
from tailrace.policies.families.tail import Hold

Evidence = Literal["own", "group", "history", "all"]


@dataclass(frozen=True, slots=True)
class System:
    """`evidence`: the source of drafts. `policies` without `chunking` takes `chunk_share` of the workload's, and has no
    lanes without `lanes`. `races`: if replicas have room, copies race, each with one of the workload's draft models in
    turn with the target, by the table of SpecActor's systems, on the replica's own GPUs. `holds`: samples are held
    between their turns; else each turn is a new request.
    """

    about: str
    policies: dict
    evidence: Evidence = "all"
    admission: bool = True
    reveal: bool = False
    chunk_share: float = 1.0
    races: bool = False
    holds: bool = True

    def bundle(self, chunk_tokens: int) -> Policies:
        tokens = max(1, round(chunk_tokens * self.chunk_share))
        return Policies(**{"chunking": {"type": "fixed", "chunk_tokens": tokens}, "lanes": "none"} | self.policies)


WHOLE = {"type": "fixed", "chunk_tokens": None}
STATIC = {"ordering": "group_static", "placement": "pinned", "chunking": WHOLE, "drafting": "off"}
ROUTED = {"ordering": "fcfs", "placement": "round_robin", "chunking": WHOLE, "drafting": "off"}
CHUNKED = {"ordering": "fcfs", "placement": "least_kv", "drafting": "off"}
SEER = CHUNKED | {"ordering": "seer", "lengths": "max_finished"}
OURS = CHUNKED | {"ordering": "remaining_first", "lengths": "max_finished"}


def _fixed(tokens: int) -> dict:
    return {"drafting": {"type": "fixed", "tokens": tokens}}


def _ours(
    about: str, changes: dict, evidence: Evidence = "all", races: bool = False, holds: bool = True, reveal: bool = False
) -> System:
    """Returns a system with chunks of a quarter: a chunk reserves the KV of all tokens that it may make, so long ones
    leave KV unused, and the cost of a hand-over is small against that.
    """
    return System(about, OURS | changes, evidence, chunk_share=0.25, races=races, holds=holds, reveal=reveal)


def _static(about: str, changes: dict, evidence: Evidence) -> System:
    return System(about, STATIC | changes, evidence, admission=False)


def _routed(about: str, changes: dict) -> System:
    """Returns a system that sends all samples at once, so that the fewest in flight means one after the other. Its
    drafts see all mates, also those on other replicas, whose tokens vLLM's suffix cache would not have.
    """
    return System(about, ROUTED | changes, admission=False)


SYSTEMS = {
    "verl": _static("whole groups bound to replicas up front, samples in one piece", {}, "own"),
    "vanilla": _static("verl with four n-gram drafts a step, always", _fixed(4), "own"),
    "das": _static(
        "verl with drafts from history by length class (DAS)",
        {"lengths": "length_class", "drafting": "length_class"}, "history",
    ),
    "das_unlimited": _static("verl with 16 drafts from history a step, always", _fixed(16), "history"),
    "histospec": _static("verl with drafts from history by RhymeRL's window", {"drafting": "aimd"}, "history"),
    "routed": _routed("each sample whole to the replica with fewest in flight (verl's agent loop, prime-rl)", {}),
    "routed_suffix": _routed("routed with up to 16 drafts a step, always, from group and history", _fixed(16)),
    "routed_drafts": _routed("routed with tailrace's drafts", {"drafting": "goodput"}),
    "divided": System("chunks over all replicas, first come, first served", CHUNKED),
    "seer": System("chunks, groups expected to be longest first (Seer, Algorithm 1)", SEER),
    "seer_drafts": System("Seer, drafts from the group by concurrency", SEER | {"drafting": "concurrency"}, "group"),
    "oracle": System("chunks, truly longest first", CHUNKED | {"ordering": "oracle_longest_first"}, reveal=True),
    "remaining": _ours("short chunks, max expected remainder first", {}),
    "tailrace_own": _ours("tailrace, drafts from the sample itself alone", {"drafting": "goodput"}, "own"),
    "tailrace_fixed": _ours("tailrace, four drafts a step, always", _fixed(4)),
    "tailrace": _ours(
        "remaining, with drafts from group and history by goodput, placed by cost, and lanes where they gain",
        {"drafting": "goodput", "placement": "cost_aware", "lanes": "auto"},
    ),
    "tailrace_free": _ours("tailrace without lanes, placed by room", {"drafting": "goodput"}),
    "clairvoyant": _ours(
        "tailrace with lanes by true lengths: what scheduling can reach",
        {"drafting": "goodput", "lanes": "clairvoyant"}, reveal=True,
    ),
    "tailrace_near": _ours(
        "tailrace without lanes",
        {"drafting": "goodput", "placement": "cost_aware"},
    ),
    "tailrace_requests": _ours(
        "tailrace_near; each turn of a sample is a new request", {"drafting": "goodput", "placement": "cost_aware"},
        holds=False,
    ),
    "tailrace_release": _ours(
        "tailrace; replicas that run nothing are given back", {"drafting": "goodput", "tail": "release"},
    ),
    "tailrace_consolidate": _ours(
        "tailrace; remaining samples move together, and the other replicas are given back",
        {"drafting": "goodput", "tail": "consolidate"},
    ),
    "tailrace_threshold": _ours(
        "tailrace; a quarter of the replicas stays for the last fifth of the samples (as RollPacker scales down)",
        {"drafting": "goodput", "tail": "threshold"},
    ),
    "tailrace_race": _ours(
        "tailrace; where replicas have room, stragglers race with draft models", {"drafting": "goodput"}, races=True,
    ),
    "tailrace_auto": _ours(
        "tailrace; replicas take moved samples or race while that pays, and are given back else",
        {"drafting": "goodput", "tail": "auto"}, races=True,
    ),
    "tailrace_thrifty": _ours(
        "tailrace_auto, where a second of all replicas is worth as much as one of makespan",
        {"drafting": "goodput", "tail": {"type": "auto", "worth": 1.0}}, races=True,
    ),
}  # fmt: skip


def system(name: str) -> System:
    """Looks up a system. Raises ValueError that suggests the closest name."""
    if name not in SYSTEMS:
        near = get_close_matches(name, SYSTEMS, n=1, cutoff=0.4)
        hint = f"nearest: {near[0]}; " if near else ""
        raise ValueError(f"no system is called {name!r}; {hint}known: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


@dataclass(frozen=True, slots=True)
class Sees:
    """Chances of a drafter that sees no more than `evidence`."""

    chances: Chances
    evidence: Evidence

    def chance(self, group: WorkloadGroup, index: int, generated: int, mates: int, epochs: int) -> float:
        mates = mates if self.evidence in ("group", "all") else 0
        epochs = epochs if self.evidence in ("history", "all") else 0
        return self.chances.chance(group, index, generated, mates, epochs)


def _with_races(
    own: Callable[[int], Speculation], race_methods: RaceMethods, odds: Odds, index: int
) -> RacingSpeculation:
    return RacingSpeculation(own(index), race_methods.own, race_methods.ways, odds)


@dataclass(frozen=True, slots=True)
class Setup:
    """Common parts of all systems of a comparison. `chances` is None without drafts, `race_methods` without races."""

    workload: Workload
    cluster: Cluster
    chunk_tokens: int
    chances: Chances | None
    race_methods: RaceMethods | None = None

    @classmethod
    def of(cls, scenario: Scenario, seed: int, steps: int = 1) -> "Setup":
        """Returns a paper's workload, drawn again for each seed, on its cluster."""
        model = replica_model(scenario.gpu.value, scenario.model.value, scenario.gpus_per_replica.value)
        cluster = Cluster(model, scenario.replicas, scenario.replicas_per_node)
        index = scenario.drafting()[0]
        mates = scenario.samples.value - 1
        able = race_methods_of(scenario, model, index.name, mates=mates, ahead=False) if scenario.methods else None
        return cls(scenario.workload(seed, steps), cluster, scenario.chunk_tokens.value, index.acceptance, able)

    def run(
        self,
        name: str,
        chosen: System,
        seed: int,
        *,
        speculation: Callable[[int], Speculation] | None = None,
        spans: bool = False,
        check: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> SimulatedRun:
        """Runs one system. Its bounds are those of all systems that may draft as it does. `speculation`: the drafts of
        a replica, by its index; the chances are then for the bounds alone. Raises ValueError if it races without race
        methods.
        """
        policies = chosen.bundle(self.chunk_tokens)
        drafts = policies.drafting.max_draft_tokens if self.chances is not None else 0
        sees, best, odds = Sees(self.chances, chosen.evidence) if drafts else None, self.chances, Odds(seed)
        if chosen.races:
            if self.race_methods is None:
                raise ValueError(f"{name}: {self.workload.name} names no draft model to race with")
            policies, ways = policies.model_copy(update={"racing": self.race_methods.policy}), self.race_methods.ways
            own = by_policy(policies.drafting, sees, self.cluster.replica.step, seed)
            speculation = partial(_with_races, own, self.race_methods, odds)
            best = BestOf([ModelledMethod("own", self.chances), *(odds.facing(way.method) for way in ways.values())])
            drafts = max(drafts, *(way.window for way in ways.values()))
        run = simulate(
            self.workload, self.cluster, policies, seed=seed, admission=chosen.admission, speculation=speculation,
            acceptance=sees, spans=spans, check=check,
            elastic=None if isinstance(policies.tail, Hold) else Limits(1, self.cluster.replicas),
            reveal=chosen.reveal, holds=chosen.holds, system=name, progress=progress,
        )  # fmt: skip
        found = [bounds(step, self.cluster, best, drafts) for step in self.workload.steps]
        spent = account(run, self.workload, self.cluster, best, drafts) if spans else {}
        return replace(run, bounds={key: sum(of_step[key] for of_step in found) for key in found[0]}, account=spent)
