"""SpecActor's systems over a paper's set-up: verl with drafts in turn, decoupled, reconfigured, and with Fastest-of-N.

All systems bind whole groups to replicas at the start and leave queueing to vLLM, as verl does. Each sample's drafts
are right by the same odds in all of them. Decoupled systems divide the GPUs into groups of drafter and verifier by
Algorithm 1, for the step's samples and the mean context. Each group is one replica; GPUs left over stay idle. Races are
the core's: copies begin where their chunk began, SpecActor's where the sample stands. So systems that race take chunks,
and a copy has little to catch up with. Invariant: plans and ladders know the methods' tables and mean lengths alone.
Called by `tailrace bench specactor`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from tailrace.lab.simulator.acceptance import BestOf
from tailrace.lab.simulator.bounds import bounds
from tailrace.lab.simulator.decoupled import MOST_WINDOW, DraftModelSpeculation, DraftSetup, Odds
from tailrace.lab.simulator.hardware import replica_model
from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.race_methods import mean_chance, race_methods_of, verifier_of
from tailrace.lab.simulator.scenario import Scenario
from tailrace.lab.simulator.types import Cluster, SimulatedRun
from tailrace.policies.families.chunking import FixedChunks
from tailrace.policies.families.registry import Policies
from tailrace.policies.models.spec_cost_model import DrafterCost, VerifierCost, published_tokens_s
from tailrace.policies.models.specactor_planner import Decoupled, Plan

POLICIES = Policies(
    ordering="group_static", placement="pinned", chunking={"type": "fixed", "chunk_tokens": None}, drafting="off"
)

DRAFTS = 4
"""Number of draft tokens of a sample in a step if drafting and verifying alternate, as in the scenarios' tables."""

VERIFIER_GPUS = (4, 8)
"""Numbers of GPUs over which Algorithm 1 may split the model: inside a node, and no fewer than SpecActor's (5.1)."""

DRAFTER_GPUS = (1, 2, 4)
"""Numbers of drafters of one group, which share its samples. Each drafter has one GPU (SpecActor 4.1)."""


@dataclass(frozen=True, slots=True)
class SpecActor:
    """`method`: name of the method that drafts in turn with verification; None: as Algorithm 1 plans. `published`:
    plans are by the paper's own formula, always with a drafter. Else they are by `policies.models.specactor_planner`,
    exact for the rounds that are simulated, and plain decoding is a choice too.
    """

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
    """Division of the cluster, and the way in which samples are drafted. `plan`: None if nothing was planned."""

    cluster: Cluster
    way: DraftSetup
    plan: Plan | None = None


def run(
    scenario: Scenario, name: str, seed: int, steps: int = 1, *, spans: bool = False, check: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SimulatedRun:  # fmt: skip
    """Returns the run of one of SYSTEMS on a paper's workload, with its lower bounds."""
    chosen, workload, methods = SYSTEMS[name], scenario.workload(seed, steps), scenario.drafting()
    odds = Odds(seed)
    layout = coupled(scenario, chosen.method) if chosen.method else decoupled(scenario, chosen.published)
    model, rate = layout.cluster.replica, "published" if chosen.published else "renewal"
    reconfigures = chosen.reconfigure and layout.plan and layout.plan.drafter
    policy = Decoupled(rate=rate) if reconfigures else None
    policies, ways = POLICIES, {}
    if chosen.race:
        own = layout.way.method.name if layout.way.window else None
        racing, _, ways = race_methods_of(scenario, model, own, ahead=layout.way.ahead)
        chunking = FixedChunks(chunk_tokens=scenario.chunk_tokens.value)
        policies = POLICIES.model_copy(update={"racing": racing, "chunking": chunking})
    ran = simulate(
        workload, layout.cluster, policies, seed=seed, admission=False,
        speculation=lambda index: DraftModelSpeculation(
            way=layout.way, odds=odds, step=model.step, races=ways, plan=layout.plan, policy=policy,
        ),
        spans=spans, check=check, system=name, progress=progress,
    )  # fmt: skip
    chances = BestOf([odds.facing(method) for method in (methods if chosen.race else (layout.way.method,))])
    most = DraftModelSpeculation(
        way=layout.way, odds=odds, step=model.step, races=ways, plan=layout.plan, policy=policy
    ).most
    found = [bounds(step, layout.cluster, chances, most) for step in workload.steps]
    return replace(ran, bounds={key: sum(of_step[key] for of_step in found) for key in found[0]})


def coupled(scenario: Scenario, method: str) -> Layout:
    """Returns the layout of verl's replicas, each of which drafts and verifies in turn."""
    model = replica_model(scenario.gpu.value, scenario.model.value, scenario.gpus_per_replica.value)
    cluster = Cluster(model, scenario.replicas, scenario.replicas_per_node)
    return Layout(cluster, DraftSetup(next(m for m in scenario.drafting() if m.name == method), DRAFTS, False))


def decoupled(scenario: Scenario, published: bool) -> Layout:
    """Returns the layout of the best plan of Algorithm 1 over all draft models."""
    gpus, samples = scenario.gpus.value, scenario.prompts.value * scenario.samples.value
    models = {n: replica_model(scenario.gpu.value, scenario.model.value, n) for n in VERIFIER_GPUS}
    verifiers = [verifier_of(scenario, model) for model in models.values()]
    find, plans = _published_plan if published else Decoupled(max_window=MOST_WINDOW, rate="renewal").plan, []
    for method in scenario.drafting():
        if method.draft_s(1):
            drafters = [DrafterCost(n, method.token_s / n, method.base_s) for n in DRAFTER_GPUS]
            plans.append((find(samples, gpus, mean_chance(method), drafters, verifiers), method))
    plan, method = max(plans, key=lambda pair: (pair[0].tokens_s, pair[1].name))
    if plan.drafter:
        method = replace(method, token_s=plan.drafter.sample_s)
    size = plan.drafter_gpus + plan.verifier_gpus
    group = replace(models[plan.verifier_gpus], gpus=size)
    cluster = Cluster(group, gpus // size, max(1, scenario.gpus_per_node.value // size))
    return Layout(cluster, DraftSetup(method, plan.window, plan.window > 0), plan)


def _published_plan(
    samples: int, gpus: int, p: float, drafters: Sequence[DrafterCost], verifiers: Sequence[VerifierCost]
) -> Plan:
    """Returns the plan with the most tokens a second over all pairs and windows: Algorithm 1 as printed, except for the
    end of its windows.
    """
    pairs = [(d, v, ceil((d.gpus + v.gpus) * samples / gpus)) for v in verifiers for d in drafters if d.gpus <= v.gpus]
    rated = [
        Plan(
            drafter=d,
            verifier=v,
            window=w,
            samples=b,
            tokens_s=published_tokens_s(p, d, v, b, w),
            reason=f"accepts {p:.2f}",
        )
        for d, v, b in pairs
        for w in range(1, MOST_WINDOW + 1)
    ]
    return max(rated, key=lambda plan: (plan.tokens_s, -plan.drafter_gpus, -plan.window))
