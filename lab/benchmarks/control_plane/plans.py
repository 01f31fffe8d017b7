"""Benchmark of the core's plans of lanes, beliefs and books included: milliseconds, and whether they grow with the
samples.

A batch with one epoch of history runs on measured replicas with room for all of it. Between plans each running sample
streams more tokens. The least processor time of several plans counts: other work on a shared machine only ever makes a
plan slower.
"""

import time

import numpy as np

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.events import (
    GroupSpec,
    ReplicaJoined,
    ReplicaMeasured,
    SamplesSubmitted,
    Tick,
    TokensStreamed,
)
from tailrace.policies.protocol.performance import MethodAcceptance, Performance

GROUP_SAMPLES = 16
MAX_TOKENS = 16_384
PLANS = 12
SIZES = ((1_024, 16), (4_096, 64), (16_384, 64), (16_384, 256))
"""Numbers of samples and of replicas for each figure."""

POINTS = tuple(float(1 << power) for power in range(14))
STEPS = Performance(
    observed_at=0.0,
    step_tokens=POINTS,
    step_seconds=tuple(0.011 + 2e-5 * tokens for tokens in POINTS),
    context_token_s=2e-8,
    acceptance=(MethodAcceptance("group", 850.0, 1_000.0),),
)
"""Measured steps of every replica: about those of a dense 32B model on four GPUs."""


def plan_ms(samples: int, replicas: int) -> float:
    """Returns the milliseconds of a plan for `samples` samples on `replicas` replicas."""
    core = RolloutCore(Policies(lanes={"type": "auto", "min_gain": -1e9}, drafting="goodput"))
    for index in range(replicas):
        core.observe(
            ReplicaJoined(
                now=0.0,
                replica_id=f"r{index:04}",
                block_tokens=16,
                kv_capacity_blocks=1 << 20,
                max_running=samples,
                draft_tokens=0,
                weights_version=0,
            )
        )
        core.observe(ReplicaMeasured(0.0, f"r{index:04}", STEPS))
    draws = np.random.default_rng(0)
    levels = draws.standard_normal(samples // GROUP_SAMPLES)
    own = 0.3 * draws.standard_normal((len(levels), GROUP_SAMPLES))
    past = np.exp(7.5 + 0.85 * levels[:, None] + own).clip(1, MAX_TOKENS).astype(int).tolist()
    groups = tuple(
        GroupSpec(f"g{n}", 200, GROUP_SAMPLES, MAX_TOKENS, (tuple(lengths),)) for n, lengths in enumerate(past)
    )
    core.observe(SamplesSubmitted(0.0, "batch", groups))
    running = [action.chunk_id for action in core.decide(Tick(0.0)) if isinstance(action, StartChunk)]
    took = []
    for turn in range(1, PLANS + 1):
        now = 10.0 * turn
        core.observe(TokensStreamed(now, dict.fromkeys(running, 20 * turn), now))
        began = time.process_time()
        core._lanes.renew(now)
        took.append(time.process_time() - began)
    return 1_000 * min(took)


def plans() -> dict[str, float]:
    """Returns the milliseconds of a plan by size, samples x replicas."""
    return {f"{samples} x {replicas}": round(plan_ms(samples, replicas), 1) for samples, replicas in SIZES}
