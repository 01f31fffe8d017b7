"""SpecActor's systems over a paper's set-up: verl with drafts in turn, decoupled, reconfigured, and with Fastest-of-N.

All bind whole groups to replicas up front and leave queueing to vLLM, as verl does; each sample's drafts are right by
the same odds in all of them. Decoupled, the GPUs are cut into groups of drafter and verifier as Algorithm 1 says for
the step's samples and the mean context; a group is one replica, GPUs left over stay idle. Invariant:
plans and ladders know the methods' tables and mean lengths alone. Called by `app simulate` and by benchmarks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from app.simulator.acceptance import BestOf, Method
from app.simulator.bounds import bounds
from app.simulator.decoupled import MOST_WINDOW, Drafted, Odds, Way, best_way
from app.simulator.hardware import replica_model
from app.simulator.host import simulate
from app.simulator.races import Racing
from app.simulator.scenario import Scenario
from app.simulator.types import Cluster, ReplicaModel, Run
from policies.bundle import Policies
from policies.decoupled import Drafter, Verifier, published_tokens_s
from policies.planning import Decoupled, Plan
from policies.racing import FastestOfN, Ladder, Rung

POLICIES = Policies(
    ordering="group_static", placement="pinned", chunking={"type": "fixed", "chunk_tokens": None}, drafting="off"
)

DRAFTS = 4
"""Draft tokens of a sample in a step where drafts come in turn, as in the scenarios' tables."""

VERIFIER_GPUS = (4, 8)
"""Ways to split the model that Algorithm 1 may choose from: inside a node, and no fewer than SpecActor's (5.1)."""

DRAFTER_GPUS = (1, 2, 4)
"""Drafters of one group, each of one GPU (SpecActor 4.1), which share its samples."""

RACE_SHARE = 0.25
"""Assumed, since no b_max is published: copies may lengthen a step by this share of what it takes by itself."""


@dataclass(frozen=True, slots=True)
class SpecActor:
    """`method`: in turn with it; None: as Algorithm 1 plans. `published`: by the paper's own formula, and there has to
    be a drafter; else by `policies.planning`, for which plain decoding is a choice too."""

    about: str
    method: str | None = None
    reconfigure: bool = False
    race: bool = False
    published: bool = True


SYSTEMS = {
    "vanilla_model": SpecActor("verl with four drafts of a 0.5B model a step, in turn", "draft-0.5b"),
    "vanilla_ngram": SpecActor("verl with four n-gram drafts a step, in turn", "index"),
    "decoupled": SpecActor("drafters beside verifiers, planned once (SpecActor, Algorithm 1)"),
    "reconfigured": SpecActor("decoupled, windows by sample (Algorithm 2)", reconfigure=True),
    "specactor": SpecActor("reconfigured, and Fastest-of-N (Algorithm 3)", reconfigure=True, race=True),
    "planned": SpecActor("drafters beside verifiers only where that pays", published=False),
    "planned_races": SpecActor("planned, and Fastest-of-N", race=True, published=False),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What the cluster is cut into, and how samples are drafted. `plan`: None where nothing was planned."""

    cluster: Cluster
    way: Way
    plan: Plan | None = None


def run(
    scenario: Scenario, name: str, seed: int, steps: int = 1, *, spans: bool = False, check: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Run:  # fmt: skip
    """One of SYSTEMS on a paper's workload, with its lower bounds."""
    chosen, workload, methods = SYSTEMS[name], scenario.workload(seed, steps), scenario.drafting()
    odds = Odds(seed)
    layout = coupled(scenario, chosen.method) if chosen.method else decoupled(scenario, chosen.published)
    model, policy = layout.cluster.replica, Decoupled(published=chosen.published) if chosen.reconfigure else None
    policy = policy if layout.plan and layout.plan.drafter else None
    verifier = _verifier(scenario, model)
    ways = {method.name: best_way(method, _mean(method), verifier, 1)[0] for method in methods} if chosen.race else {}
    racing = _racing(methods, layout.way, ways, verifier, odds) if chosen.race else None
    ran = simulate(
        workload, layout.cluster, POLICIES, seed=seed, admission=False,
        speculation=lambda index: Drafted(layout.way, odds, model.step, ways, layout.plan, policy),
        racing=racing, spans=spans, check=check, system=name, progress=progress,
    )  # fmt: skip
    chances = BestOf([odds.facing(method) for method in (methods if chosen.race else (layout.way.method,))])
    most = Drafted(layout.way, odds, model.step, ways, layout.plan, policy).most
    found = [bounds(step, layout.cluster, chances, most) for step in workload.steps]
    return replace(ran, bounds={key: sum(of_step[key] for of_step in found) for key in found[0]})


def coupled(scenario: Scenario, method: str) -> Layout:
    """verl's replicas, each of which drafts and verifies in turn."""
    model = replica_model(scenario.gpu.value, scenario.model.value, scenario.gpus_per_replica.value)
    cluster = Cluster(model, scenario.replicas, scenario.replicas_per_node)
    return Layout(cluster, Way(next(m for m in scenario.drafting() if m.name == method), DRAFTS, False))


def decoupled(scenario: Scenario, published: bool) -> Layout:
    """Algorithm 1 for each draft model, and the best of these plans."""
    gpus, samples = scenario.gpus.value, scenario.prompts.value * scenario.samples.value
    models = {n: replica_model(scenario.gpu.value, scenario.model.value, n) for n in VERIFIER_GPUS}
    verifiers = [_verifier(scenario, model) for model in models.values()]
    find, plans = _published_plan if published else Decoupled(most_window=MOST_WINDOW).plan, []
    for method in scenario.drafting():
        if method.draft_s(1):
            drafters = [Drafter(n, method.token_s / n, method.base_s) for n in DRAFTER_GPUS]
            plans.append((find(samples, gpus, _mean(method), drafters, verifiers), method))
    plan, method = max(plans, key=lambda pair: (pair[0].tokens_s, pair[1].name))
    if plan.drafter:
        method = replace(method, token_s=plan.drafter.sample_s)
    size = plan.drafter_gpus + plan.verifier_gpus
    group = replace(models[plan.verifier_gpus], gpus=size)
    cluster = Cluster(group, gpus // size, max(1, scenario.gpus_per_node.value // size))
    return Layout(cluster, Way(method, plan.window, plan.window > 0), plan)


def _published_plan(
    samples: int, gpus: int, p: float, drafters: Sequence[Drafter], verifiers: Sequence[Verifier]
) -> Plan:
    """Algorithm 1 as printed, but for its end of windows: of every pair and window the most tokens a second."""
    pairs = [(d, v, ceil((d.gpus + v.gpus) * samples / gpus)) for v in verifiers for d in drafters if d.gpus <= v.gpus]
    rated = [
        Plan(d, v, w, b, published_tokens_s(p, d, v, b, w), f"accepts {p:.2f}")
        for d, v, b in pairs
        for w in range(1, MOST_WINDOW + 1)
    ]
    return max(rated, key=lambda plan: (plan.tokens_s, -plan.drafter_gpus, -plan.window))


def _racing(methods: tuple[Method, ...], own: Way, ways: dict[str, Way], verifier: Verifier, odds: Odds) -> Racing:
    """The ladder as profiled for a sample that runs alone; room for copies by the longest window of all."""
    rates = [n / 20 for n in range(21)]
    plain_s = verifier.seconds(1, 0)
    rungs = (
        Rung(m.name, tuple((p, best_way(m, p, verifier, 1)[1] * plain_s) for p in rates), (_mean(m),)) for m in methods
    )
    widest = 1 + max(way.window for way in ways.values())
    room = max(1, int(RACE_SHARE * verifier.base_s / (widest * verifier.token_s)))
    named = {method.name: method for method in methods}
    return Racing(FastestOfN(), Ladder(tuple(rungs)), named, own.method.name if own.window else None, odds, room)


def _verifier(scenario: Scenario, model: ReplicaModel) -> Verifier:
    """A step of the replica at the context that samples have on average: the prompt and half of a mean answer."""
    context = scenario.prompt_tokens.value + scenario.law().mean() / 2
    return Verifier(model.gpus, model.step.context_s * context, model.step.token_s, model.step.base_s)


def _mean(method: Method) -> float:
    """Mean acceptance of a draft token, as profiled: of the average sample without mates."""
    return method.acceptance.mean_chance(0)
