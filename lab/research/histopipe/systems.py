"""Pipelines over many steps, side by side: sequential as in verl, in the order given, and HistoPipe's (RhymeRL 6).

Invariant: the same steps and parameters give the same figures. `PipelineHost` is the clock. In sequential mode the same
GPUs generate and train, so training is no bubble. In a pipeline training has separate GPUs, which are not counted here.
Called by `bench`.
"""

from collections.abc import Sequence
from typing import Literal

from tailrace.lab.research.histopipe.batch import NO_DRAFTS, Drafts
from tailrace.lab.research.histopipe.host import PipelineHost, Times
from tailrace.lab.research.histopipe.policy import HistoPipeline
from tailrace.lab.simulator.types import Cluster, WorkloadGroup

Mode = Literal["sequential", "naive", "alternating", "tiers"]
MODES: tuple[Mode, ...] = ("sequential", "naive", "alternating", "tiers")
"""Names of modes: a barrier after each step; a pipeline with prompts in the order given; HistoPipe's first tier; both
of its tiers.
"""


def run_pipeline(
    steps: Sequence[tuple[WorkloadGroup, ...]],
    cluster: Cluster,
    mode: Mode,
    *,
    train_s: float,
    weights_s: float,
    migrate: bool = True,
    drafts: Drafts = NO_DRAFTS,
    policy: HistoPipeline | None = None,
) -> dict:
    """Returns the figures of one pipeline; `policy` gives HistoPipe's knobs.

    total_s: seconds until the last step is trained on. bubbles: share of the workers' time until the last answer in
    which they neither generate nor load weights. migrated: share of answers that moved, within a step and to the next.
    staleness: maximum number of training steps that the weights of a turn lacked, and share of turns whose weights
    lacked any. Raises ValueError for an unknown mode or an empty step.
    """
    host = host_of(
        steps, cluster, mode, train_s=train_s, weights_s=weights_s, migrate=migrate, drafts=drafts, policy=policy
    )
    host.run()
    answers, end_s = len(host.ended), max(turn.end_s for turn in host.turns)
    trained_s = train_s * (len(steps) - 1) if mode == "sequential" else 0.0
    busy_s = sum(turn.end_s - turn.begin_s for turn in host.turns)
    tokens = sum(answer.length for answer in host.ended)
    stale = [turn.step - turn.version for turn in host.turns]
    return {
        "mode": mode,
        "migrate": migrate,
        "drafts": drafts is not NO_DRAFTS,
        "steps": len(steps),
        "answers": answers,
        "total_s": host.trained_s[-1],
        "rollout_end_s": end_s,
        "tokens_s": tokens / host.trained_s[-1],
        "bubbles": 1 - busy_s / (cluster.replicas * (end_s - trained_s)),
        "migrated": {"within": host.moved_within / answers, "next": host.moved_on / answers},
        "staleness": {"most": max(stale), "share": sum(lag > 0 for lag in stale) / len(stale)},
    }


def host_of(steps, cluster, mode, *, train_s, weights_s, migrate, drafts, policy) -> PipelineHost:
    """Returns the host of a mode, not yet run. Raises ValueError for an unknown mode or an empty step."""
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    knobs = policy or HistoPipeline()
    ranks = mode in ("alternating", "tiers")
    return PipelineHost(
        steps, cluster, knobs.model_copy(update={"two_tier": mode == "tiers"}) if ranks else None,
        Times(train_s, weights_s), barrier=mode == "sequential", migrate=migrate and ranks, drafts=drafts,
    )  # fmt: skip
