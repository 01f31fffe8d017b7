"""Recorded rollouts on a paper's cluster: `tailrace simulate` with a trace as its workload.

The last checkpoint is rolled out, the earlier ones are history: their lengths for the policies, and for drafts either
the set-up's acceptance table or all their tokens (`lab.replay.speculation`). Invariant: both are of the same workload,
and drafts use a system's `evidence`. Called by the simulate command.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.lab.replay.recorded import Recorded
from tailrace.lab.replay.speculation import replaying
from tailrace.lab.simulator.hardware import replica_model
from tailrace.lab.simulator.scenario import Scenario, trace_workload
from tailrace.lab.simulator.systems import Setup, System
from tailrace.lab.simulator.types import Cluster, SimulatedRun, WorkloadGroup


class _Always:
    """Chances of drafts that are always right."""

    def chance(self, group: WorkloadGroup, index: int, generated: int, mates: int, epochs: int) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class TraceSetup:
    """Recorded rollouts by group id on a set-up's cluster. `replay`: drafts are made from the tokens themselves."""

    setup: Setup
    recorded: Mapping[str, Recorded]
    replay: bool

    @classmethod
    def of(cls, scenario: Scenario, name: str, found: Mapping[str, Recorded], replay: bool) -> "TraceSetup":
        """Returns recorded rollouts on the set-up's replicas, with its chunk length and its acceptance table."""
        lengths, prompts = {}, {}
        for prompt_id, (prompt, answers, history) in found.items():
            past: dict[int, list[int]] = {}
            for answer in history:
                past.setdefault(answer.epoch, []).append(len(answer.tokens))
            lengths[prompt_id], prompts[prompt_id] = [*past.values(), [*map(len, answers)]], len(prompt)
        workload = trace_workload(name, lengths, prompts, scenario.max_tokens.value)
        model = replica_model(scenario.gpu.value, scenario.model.value, scenario.gpus_per_replica.value)
        cluster = Cluster(model, scenario.replicas, scenario.replicas_per_node)
        chances = scenario.drafting()[0].acceptance
        return cls(Setup(workload, cluster, scenario.chunk_tokens.value, chances), found, replay)

    def run(
        self,
        name: str,
        chosen: System,
        seed: int,
        *,
        spans: bool = False,
        check: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> SimulatedRun:
        """Runs one system. The maximum acceptance of an index is unknown, so a replay that drafts has the bounds of
        drafts that are always right.
        """
        setup, policies, evidence = self.setup, chosen.bundle(self.setup.chunk_tokens), chosen.evidence
        how = {"spans": spans, "check": check, "progress": progress}
        if not (self.replay and policies.drafting.max_draft_tokens):
            return setup.run(name, chosen, seed, **how)
        sees = IndexSettings(group_context=evidence in ("group", "all"), history=evidence in ("history", "all"))
        step = setup.cluster.replica.step
        with replaying(setup.workload, self.recorded, policies.drafting, step, sees) as speculation:
            return replace(setup, chances=_Always()).run(name, chosen, seed, speculation=speculation, **how)
