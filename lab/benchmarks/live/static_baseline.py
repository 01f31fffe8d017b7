"""Replayed rollouts on real replicas: the verl-like baseline against divided, context-aware rollout, in one service.

The baseline binds whole groups to a replica up front, and computes every sample in one piece. Tailrace runs Algorithm 1
of Seer over chunks. Both replay the same tokens on the same replicas. Before each run caches are reset, and history is
deleted: it would tell the lengths of the answers that the run replays.
"""

import asyncio
from collections.abc import Callable

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile
from tailrace.app.summary import summarise
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.policies.families.registry import Policies

KEPT = ("makespan_s", "tail_s", "tokens_per_s", "mean_sample_s", "tokens", "samples", "moved_samples", "chunked_share")


def runs(file: ServeFile, chunk_tokens: int, oracle: bool) -> dict[str, Policies]:
    """Returns the policies by name: the baseline, then Seer's ordering in chunks with the configured placement.

    `oracle`: adds the ordering by true lengths, longest first.
    """
    placement = file.application.policies.placement
    off = {"drafting": "off"}  # the comparison is of scheduling alone
    static = {"ordering": "group_static", "placement": "pinned", "chunking": {"type": "fixed", "chunk_tokens": None}}
    static |= off
    chunked = {"placement": placement, "chunking": {"type": "fixed", "chunk_tokens": chunk_tokens}} | off
    orderings = ("seer", "oracle_longest_first") if oracle else ("seer",)
    return {"group_static": Policies(**static)} | {name: Policies(ordering=name, **chunked) for name in orderings}


async def _roll(client: RolloutClient, name: str, policies: Policies, groups: tuple[PromptGroup, ...]) -> dict:
    await client.reset_caches()
    await client.forget_history()
    await client.set_policies(policies)
    batch = RolloutBatch(batch_id=f"bench-{name}", groups=groups)
    summary = summarise([group async for group in client.rollout(batch)])
    return {key: summary[key] for key in KEPT}


async def _roll_all(client, named: dict[str, Policies], groups, repeats: int, say: Callable[[str], None]) -> dict:
    rolled: dict[str, list[dict]] = {}
    for turn in range(repeats):
        for name, policies in named.items():
            result = await _roll(client, f"{name}-{turn}", policies, groups)
            rolled.setdefault(name, []).append(result)
            say(f"{name}: makespan {result['makespan_s']} s, tail {result['tail_s']} s")
    return {name: min(results, key=lambda r: r["makespan_s"]) for name, results in rolled.items()}


def measure(
    file: ServeFile,
    groups: tuple[PromptGroup, ...],
    named: dict[str, Policies],
    repeats: int,
    say: Callable[[str], None],
) -> dict:
    """Returns the run of each policy with the shortest makespan of `repeats`.

    `ratio`: makespan of the baseline over that of Seer's ordering. `tail_ratio`: the ratio of their tails.
    """
    say("starting the service")
    with service(file, None) as client:
        result = asyncio.run(_roll_all(client, named, groups, repeats, say))
    baseline, ours = result["group_static"], result["seer"]
    return {
        "runs": result,
        "ratio": round(baseline["makespan_s"] / ours["makespan_s"], 3),
        "tail_ratio": round(baseline["tail_s"] / ours["tail_s"], 3) if ours["tail_s"] else None,
        "policies": {name: policies.model_dump() for name, policies in named.items()},
        "repeats": repeats,
    }
