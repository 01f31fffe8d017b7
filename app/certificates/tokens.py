"""The same-tokens certificate: one workload, rolled out in every way that must not matter, compared token by token.

Law 2: a sample's tokens are a function of weights, prompt, sampling parameters and sample key, and of nothing else.
Logprobs, sampling and raw, may differ by floating-point noise (TOLERANCE). Called by `python -m app verify`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from app.client import RolloutClient
from app.cluster import service
from app.config import ServeFile
from app.summary import summarise
from deployments.engine.config import DraftConfig
from deployments.messages import GroupResult, RolloutBatch, SampleResult
from policies.bundle import Policies

TOLERANCE = 1e-4

REPORTED_S = 1.5
"""The coordinator has heard of everything that its replicas counted before: three polls."""

WHOLE = {"ordering": "fcfs", "placement": "pinned", "chunking": {"type": "fixed", "chunk_tokens": None}}


def chunked(tokens: int, placement: str = "least_kv") -> dict:
    return {"ordering": "seer", "placement": placement, "chunking": {"type": "fixed", "chunk_tokens": tokens}}


@dataclass(frozen=True, slots=True)
class Run:
    """One way to roll out the workload: policies, engine settings that differ, and what is done to it meanwhile."""

    name: str
    policies: dict
    engine: tuple[tuple[str, object], ...] = ()
    disturb: Callable[[RolloutClient, str], Awaitable[str]] | None = None
    must_pull: bool = False  # nothing moves until it is disturbed; then what had been saved must be pulled elsewhere


async def kill_a_replica(client: RolloutClient, batch_id: str) -> str:
    """Kill, in mid-chunk, the replica with the most chunks, once a tenth of the samples has ended."""
    import ray

    while True:
        status = await client.status()
        batch = next((b for b in status.batches if b.batch_id == batch_id), None)
        if batch and batch.ended >= batch.samples / 10:
            break
        await asyncio.sleep(0.1)
    victim = max(status.replicas, key=lambda replica: replica.running)
    names = [n["name"] for n in ray.util.list_named_actors(all_namespaces=True) if victim.replica_id in n["name"]]
    ray.kill(ray.get_actor(names[0], namespace="serve"))
    return f"killed replica {victim.replica_id}, which ran {victim.running} chunks"


RUNS = (
    Run("plain", WHOLE),
    Run("chunks_of_64", chunked(64)),
    Run("chunks_of_23", chunked(23)),
    Run("moved", chunked(48, "round_robin")),
    Run("replica_killed", chunked(96), disturb=kill_a_replica),
    Run("pulled_after_stop", chunked(32, "pinned"), disturb=kill_a_replica, must_pull=True),
    Run("batch_cap_5", chunked(64), engine=(("max_running", 5),)),
    Run("ngram_drafts", chunked(64), engine=(("draft", DraftConfig(method="ngram", lookup_min=1)),)),
)
"""The first run is the reference. Runs with the same engine settings share one service."""


async def roll(client: RolloutClient, run: Run, batch: RolloutBatch) -> dict:
    """Roll out the workload once: its groups, what was done to it, and the tokens whose KV came from the pool."""
    await client.reset_caches()
    await client.set_policies(Policies(**run.policies))
    before = await pulled_tokens(client)
    batch = batch.model_copy(update={"batch_id": f"verify-{run.name}"})
    disturbed = asyncio.create_task(run.disturb(client, batch.batch_id)) if run.disturb else None
    groups = [group async for group in client.rollout(batch)]
    note = await disturbed if disturbed else None
    await asyncio.sleep(REPORTED_S)
    return {"groups": groups, "note": note, "pulled_tokens": await pulled_tokens(client) - before}


async def pulled_tokens(client: RolloutClient) -> int:
    """Tokens whose KV replicas have pulled from the pool so far; 0 without a pool."""
    pool = await client.pool_status()
    return 0 if pool is None else pool.counts.get("pool_tokens", 0)


def roll_all(file: ServeFile, batch: RolloutBatch, say: Callable[[str], None]) -> dict[str, dict]:
    """Every run's groups and note by run name. Services are started and stopped as the runs need them."""
    rolled: dict[str, dict] = {}
    engines = dict.fromkeys(run.engine for run in RUNS)
    for engine in engines:
        say(f"starting two replicas{''.join(f', {key} = {value}' for key, value in engine)}")
        with service(with_engine(file, dict(engine)), None) as client:
            for run in (run for run in RUNS if run.engine == engine):
                rolled[run.name] = done = asyncio.run(roll(client, run, batch))
                note = f", {done['note']}" if done["note"] else ""
                say(f"{run.name}: {summarise(done['groups'])['tokens']} tokens, {done['pulled_tokens']} pulled{note}")
    return rolled


def with_engine(file: ServeFile, changes: dict) -> ServeFile:
    """The configuration with other engine settings."""
    application = file.application
    args = application.args.model_copy(update={"engine": application.args.engine.model_copy(update=changes)})
    return file.model_copy(update={"applications": (application.model_copy(update={"args": args}),)})


def corrupt(groups: list[GroupResult]) -> list[GroupResult]:
    """One token of one sample made another: what the certificate must find."""
    group = groups[0]
    sample = group.samples[-1]
    position = len(sample.token_ids) // 2
    tokens = (*sample.token_ids[:position], sample.token_ids[position] ^ 1, *sample.token_ids[position + 1 :])
    wrong = group.model_copy(update={"samples": (*group.samples[:-1], sample.model_copy(update={"token_ids": tokens}))})
    return [wrong, *groups[1:]]


def compare(expected: list[GroupResult], got: list[GroupResult]) -> dict:
    """Whether two rollouts are the same; `first_difference` names prompt, sample and position.

    The logprob differences are over all tokens that agree, sampling and raw ones: the floating-point noise seen.
    """
    theirs = {(group.prompt_id, sample.sample_index): sample for group in got for sample in group.samples}
    first, noise = None, [np.zeros(1)]
    for group in sorted(expected, key=lambda g: g.prompt_id):
        for sample in group.samples:
            difference, gaps = _difference(sample, theirs.get((group.prompt_id, sample.sample_index)))
            noise.append(gaps)
            if difference and first is None:
                first = {"prompt_id": group.prompt_id, "sample_index": sample.sample_index, **difference}
    seen = np.concatenate(noise)
    return {
        "identical": first is None,
        "first_difference": first,
        "max_logprob_difference": float(seen.max()),
        "mean_logprob_difference": float(seen.mean()),
    }


def _difference(a: SampleResult, b: SampleResult | None) -> tuple[dict | None, np.ndarray]:
    """What differs first, and the logprob differences of the tokens before it."""
    if b is None:
        return {"position": 0, "what": "missing"}, np.zeros(0)
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    common = min(len(a.token_ids), len(b.token_ids))
    end = next((position for position, (x, y) in enumerate(pairs) if x != y), common)
    kinds = ("logprobs", "raw_logprobs")
    gaps = {kind: np.abs(np.subtract(getattr(a, kind)[:end], getattr(b, kind)[:end])) for kind in kinds}
    for what, gap in gaps.items():
        for position in np.flatnonzero(~(gap <= TOLERANCE)):
            return {"position": int(position), "what": what, "gap": float(gap[position])}, np.zeros(0)
    noise = np.concatenate(list(gaps.values()))
    if end < common:
        return {"position": end, "what": "token", "expected": a.token_ids[end], "got": b.token_ids[end]}, noise
    ends = [(len(sample.token_ids), str(sample.finish_reason)) for sample in (a, b)]
    if ends[0] != ends[1]:
        return {"position": end, "what": "end", "expected": ends[0], "got": ends[1]}, noise
    return None, noise


def certificate(rolled: dict[str, dict]) -> dict:
    """Every run against the first."""
    reference = rolled[RUNS[0].name]["groups"]
    must_pull = {run.name for run in RUNS if run.must_pull}
    kept = ("samples", "tokens", "chunked_share", "moved_samples", "drafted_tokens", "accepted_share")
    runs = []
    for name, run in rolled.items():
        summary, same = summarise(run["groups"]), compare(reference, run["groups"])
        if name in must_pull and not run["pulled_tokens"] and same["identical"]:
            what = {"prompt_id": "", "sample_index": 0, "position": 0, "what": "nothing was pulled from the pool"}
            same |= {"identical": False, "first_difference": what}
        figures = {k: summary[k] for k in kept} | {k: run[k] for k in ("pulled_tokens", "note")}
        runs.append({"name": name, **same, **figures})
    return {
        "identical": all(run["identical"] for run in runs),
        "tokens": summarise(reference)["tokens"],
        "samples": summarise(reference)["samples"],
        "runs": runs,
    }
