"""The ways to roll out one workload that must not matter: chunks, moves, crashes, batches, and whatever drafts.

The first run is the reference: no chunks, no moves, no drafts. Each of the others differs in several ways at once, so
that together they pass through every drafting policy and every source of drafts. Called by app/verification/tokens.py.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tailrace.app.client import RolloutClient
from tailrace.app.verification.services import Engine, Service
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.messages.status import BatchStatus, ServiceStatus
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.policies.families.racing import USUAL, MethodProfile

UNDER_WAY_TOKENS = 20
"""Of a sample, on average: by then each has ended a chunk of 16, and the majority continue."""

SHOWN = {
    "drafted_tokens": "nothing was drafted",
    "model_tokens": "no draft was a draft model's",
    "pulled_tokens": "nothing was pulled from the pool",
    "moved_samples": "no sample moved",
    "races": "nothing raced",
    "note": "its disturbance did not happen",
}
"""Figures that show the purpose of a run, with the fault if one is 0."""


@dataclass(frozen=True, slots=True)
class VerificationRun:
    """One run: policies, the service, and a disturbance of it (returned as a note; empty if it did not happen).

    `shows`: keys of SHOWN, a note is one for each run that is disturbed.
    """

    name: str
    policies: dict
    service: Service
    shows: tuple[str, ...] = ("drafted_tokens",)
    disturb: Callable[[RolloutClient, str], Awaitable[str]] | None = None
    after_an_epoch: bool = False  # another epoch of the same prompts is rolled out first, and drafted from


def chunked(tokens: int, drafting: str | dict, placement: str = "least_kv") -> dict:
    chunking = {"type": "fixed", "chunk_tokens": tokens}
    return {"ordering": "seer", "placement": placement, "chunking": chunking, "drafting": drafting}


def batch_of(status: ServiceStatus, batch_id: str) -> BatchStatus | None:
    return next((batch for batch in status.batches if batch.batch_id == batch_id), None)


async def _under_way(client: RolloutClient, batch_id: str) -> ServiceStatus:
    """The service's status once samples have UNDER_WAY_TOKENS on average, or half of them have ended."""
    while True:
        status = await client.status()
        batch = batch_of(status, batch_id)
        if batch and (batch.tokens >= UNDER_WAY_TOKENS * batch.samples or batch.ended >= batch.samples / 2):
            return status
        await asyncio.sleep(0.1)


def _kill(part: str, no_restart: bool = True) -> int:
    """Every actor with this in its name; how many there were."""
    import ray

    actors = [named for named in ray.util.list_named_actors(all_namespaces=True) if part in named["name"]]
    for actor in actors:
        ray.kill(ray.get_actor(actor["name"], actor["namespace"]), no_restart=no_restart)
    return len(actors)


async def kill_a_replica(client: RolloutClient, batch_id: str) -> str:
    """Kill, in mid-chunk, the replica with the max number of chunks."""
    status = await _under_way(client, batch_id)
    victim = max(status.replicas, key=lambda replica: replica.running)
    _kill(victim.replica_id)
    return f"killed replica {victim.replica_id}, which ran {victim.running} chunks"


async def kill_the_coordinator(client: RolloutClient, batch_id: str) -> str:
    """Serve starts another, which knows nothing; the driver's client continues."""
    status = await _under_way(client, batch_id)
    return f"killed {_kill('#Coordinator#')} coordinator with {status.running} samples running"


async def kill_the_context(client: RolloutClient, batch_id: str) -> str:
    """Kill every actor that keeps the group context; Ray starts them again, empty."""
    await _under_way(client, batch_id)
    return f"killed {_kill('-context-', no_restart=False)} actors of the group context"


async def kill_the_drafter(client: RolloutClient, batch_id: str) -> str:
    """Once its drafts come; Serve starts another."""
    before = guesses(await client.status())
    while guesses(await _under_way(client, batch_id)) <= before:
        await asyncio.sleep(0.05)
    return f"draft models killed: {_kill('#Drafter#')}"


def guesses(status: ServiceStatus) -> int:
    """Messages of draft models that engines have had so far."""
    return sum(replica.work.get("model_guesses", 0) for replica in status.replicas)


async def lose_a_replica(client: RolloutClient, batch_id: str) -> str:
    """Nothing is done to it: the tail policy gives a replica back, and it is gone before the batch has ended."""
    before = 0
    async for change in client.replica_changes():
        batch = batch_of(await client.status(), batch_id)
        if change.replicas < before and batch is not None:
            left = batch.samples - batch.ended
            return f"{before} replicas became {change.replicas} while {left} of {batch.samples} samples ran"
        before = change.replicas


def drafts(**changes) -> Engine:
    return (("draft", DraftConfig(**changes)),)


GROUP = drafts(method="group")
OWN_CAP_5 = (*drafts(index=IndexSettings(group_context=False, history=False)), ("max_running", 5))

TWO = Service(GROUP, elastic=True)
DRAFTED = Service(GROUP, drafter=True)

WHOLE = {"ordering": "fcfs", "placement": "pinned", "chunking": {"type": "fixed", "chunk_tokens": None}}
NGRAM = MethodProfile("ngram", ((0.0, 1.0), (0.9, 3.0)), (0.4,))
RACES = {"racing": {"type": "fastest_of_n", "room": 16, "rungs": (*USUAL, NGRAM)}}
SHRINKS = {"tail": {"type": "consolidate", "after_s": 0.5, "max_slowdown": 9.0}}
MOVES, PULLS = ("drafted_tokens", "moved_samples"), ("drafted_tokens", "pulled_tokens")
MODEL = {"type": "fixed", "tokens": 8}

RUNS = (
    VerificationRun("plain", WHOLE | {"drafting": "off"}, TWO, ()),
    VerificationRun("chunks_of_64", chunked(64, "length_class"), TWO),
    VerificationRun("chunks_of_23", chunked(23, {"type": "aimd", "min_match_tokens": 1}), TWO),
    VerificationRun("moved", chunked(48, "fixed", "round_robin"), TWO, MOVES),
    VerificationRun("raced", chunked(64, "closed_form") | RACES, TWO, ("drafted_tokens", "races"), kill_the_context),
    VerificationRun("history_drafts", chunked(64, "fixed"), TWO, after_an_epoch=True),
    VerificationRun("scaled_down", chunked(32, "goodput", "pinned") | SHRINKS, TWO, MOVES, lose_a_replica),
    VerificationRun("replica_killed", chunked(16, "concurrency", "pinned"), TWO, PULLS, kill_a_replica),
    VerificationRun("coordinator_killed", chunked(23, "fixed"), TWO, disturb=kill_the_coordinator),
    VerificationRun("own_drafts_cap_5", chunked(64, "fixed"), Service(OWN_CAP_5)),
    VerificationRun("ngram_drafts", chunked(64, "off"), Service(drafts(method="ngram", draft_tokens=4, lookup_min=1))),
    VerificationRun("decoupled", chunked(64, MODEL), DRAFTED, ("model_tokens",)),
    VerificationRun("drafter_killed", chunked(23, MODEL), DRAFTED, ("model_tokens",), kill_the_drafter),
)
"""Pinned samples move, and pull KV from the pool, only where their replica goes. History is forgotten before each run:
they sample under the same keys, so each would be drafted from the one before, and all of it would be right."""
