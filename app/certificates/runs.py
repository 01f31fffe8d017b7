"""The ways to roll out one workload that must not matter: chunks, moves, crashes, batches, and whatever drafts.

The first run is the reference: no chunks, no moves, no drafts. Each of the others differs in several ways at once, so
that together they pass through every drafting policy and every source of drafts. Called by app/certificates/tokens.py.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from app.client import RolloutClient
from deployments.context.settings import IndexSettings
from deployments.engine.config import DraftConfig

Engine = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One way: policies, engine settings that differ, and what is done to it meanwhile."""

    name: str
    policies: dict
    engine: Engine
    disturb: Callable[[RolloutClient, str], Awaitable[str]] | None = None
    must_pull: bool = False  # nothing moves until it is disturbed; then what had been saved must be pulled elsewhere
    must_draft: bool = True
    must_race: bool = False
    after_an_epoch: bool = False  # another epoch of the same prompts is rolled out first, and drafted from


def chunked(tokens: int, drafting: str | dict, placement: str = "least_kv") -> dict:
    chunking = {"type": "fixed", "chunk_tokens": tokens}
    return {"ordering": "seer", "placement": placement, "chunking": chunking, "drafting": drafting}


async def _under_way(client: RolloutClient, batch_id: str):
    """The service's status once a tenth of the samples has ended."""
    while True:
        status = await client.status()
        batch = next((b for b in status.batches if b.batch_id == batch_id), None)
        if batch and batch.ended >= batch.samples / 10:
            return status
        await asyncio.sleep(0.1)


async def kill_a_replica(client: RolloutClient, batch_id: str) -> str:
    """Kill, in mid-chunk, the replica with the most chunks."""
    import ray

    status = await _under_way(client, batch_id)
    victim = max(status.replicas, key=lambda replica: replica.running)
    names = [n["name"] for n in ray.util.list_named_actors(all_namespaces=True) if victim.replica_id in n["name"]]
    ray.kill(ray.get_actor(names[0], namespace="serve"))
    return f"killed replica {victim.replica_id}, which ran {victim.running} chunks"


async def kill_the_context(client: RolloutClient, batch_id: str) -> str:
    """Kill every actor that keeps the group context; Ray starts them again, empty."""
    import ray

    await _under_way(client, batch_id)
    actors = [n for n in ray.util.list_named_actors(all_namespaces=True) if "-context-" in n["name"]]
    for actor in actors:
        ray.kill(ray.get_actor(actor["name"], actor["namespace"]), no_restart=False)
    return f"killed {len(actors)} actors of the group context"


def drafts(**changes) -> Engine:
    return (("draft", DraftConfig(**changes)),)


GROUP = drafts(method="group")
OWN_CAP_5 = (*drafts(index=IndexSettings(group_context=False, history=False)), ("max_running", 5))

WHOLE = {"ordering": "fcfs", "placement": "pinned", "chunking": {"type": "fixed", "chunk_tokens": None}}

RACES = {"racing": {"type": "fastest_of_n", "room": 16}}

RUNS = (
    Run("plain", WHOLE | {"drafting": "off"}, GROUP, must_draft=False),
    Run("chunks_of_64", chunked(64, "length_class"), GROUP),
    Run("chunks_of_23", chunked(23, {"type": "aimd", "least_match_tokens": 1}), GROUP),
    Run("moved", chunked(48, "fixed", "round_robin"), GROUP),
    Run("raced", chunked(64, "closed_form") | RACES, GROUP, disturb=kill_the_context, must_race=True),
    Run("replica_killed", chunked(96, "concurrency"), GROUP, disturb=kill_a_replica),
    Run("pulled_after_stop", chunked(32, "goodput", "pinned"), GROUP, disturb=kill_a_replica, must_pull=True),
    Run("history_drafts", chunked(64, "fixed"), GROUP, after_an_epoch=True),
    Run("own_drafts_cap_5", chunked(64, "fixed"), OWN_CAP_5),
    Run("ngram_drafts", chunked(64, "off"), drafts(method="ngram", draft_tokens=4, lookup_min=1)),
)
"""Runs with the same engine settings share one service. History is forgotten before each: they sample under the same
keys, so each would be drafted from the one before, and all of it would be right."""
