"""The update certificate: samples in flight when the weights change continue as a fresh engine with the new ones would.

Law 6: KV of one version is never read under another. Each crossing sample's first chunk under the new weights must find
no KV, in the pool or on the replica, and from there on its tokens must equal those of a service that never had other
weights, given the prompt and the old tokens as its prompt. With `kv_on_update: keep` the version is left out of the
keys of samples under way: the old KV is read on, and this must fail.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile, with_engine
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch
from tailrace.lab.verification.runs import chunked
from tailrace.policies.families.registry import Policies

CHUNK_TOKENS = 32
NEW_VERSION = 1


def measure(file: ServeFile, batch: RolloutBatch, weights: Path, kv_on_update: str, say: Callable[[str], None]) -> dict:
    """Rolls out a sample of each prompt over an update to `weights` (a folder), then the rest on fresh engines."""
    groups = tuple(group.model_copy(update={"samples": 1}) for group in batch.groups)
    batch = batch.model_copy(update={"groups": groups, "batch_id": "verify-update", "keep_trace": True})
    policies = Policies(**chunked(CHUNK_TOKENS, "goodput", "round_robin"), kv_on_update=kv_on_update)
    say(f"starting two replicas, to change their weights under way (kv_on_update: {kv_on_update})")
    with service(file, None) as client:
        crossed, spans = asyncio.run(_cross(client, batch, policies, weights))
    rest = batch.model_copy(update={"groups": tuple(filter(None, map(rest_of, crossed, groups))), "keep_trace": False})
    if not rest.groups:
        return certificate(crossed, [], spans)
    say(f"{len(rest.groups)} samples crossed the update; starting two replicas that have the new weights only")
    with service(with_engine(file, {"model": str(weights)}), None) as client:
        fresh = asyncio.run(_roll(client, rest, policies))
    return certificate(crossed, fresh, spans)


async def _cross(client: RolloutClient, batch: RolloutBatch, policies: Policies, weights: Path):
    """Returns the groups of the batch, and the spans of its engine calls; the weights change when a third of it is
    done.
    """
    await client.set_policies(policies)
    total = sum(group.max_tokens for group in batch.groups)

    async def update() -> None:
        while True:
            running = next((b for b in (await client.status()).batches if b.batch_id == batch.batch_id), None)
            if running is not None and running.tokens > total / 3:
                break
            await asyncio.sleep(0.05)
        await client.update_weights(NEW_VERSION, str(weights))

    updating = asyncio.create_task(update())
    groups = [group async for group in client.rollout(batch)]
    if updating.done():
        updating.result()  # its error, if it was refused
    updating.cancel()
    spans = await client.take_trace(batch.batch_id)
    order = [group.prompt_id for group in batch.groups]
    return sorted(groups, key=lambda g: order.index(g.prompt_id)), [s for s in spans if s["name"] == "engine"]


async def _roll(client: RolloutClient, batch: RolloutBatch, policies: Policies) -> list[GroupResult]:
    await client.set_policies(policies)
    return [group async for group in client.rollout(batch)]


def crossing(group: GroupResult, version: int = NEW_VERSION) -> int | None:
    """Returns the answer position from which the sample's tokens are of `version`, or None without tokens before it or
    of it.
    """
    starts = [segment.start for segment in group.samples[0].segments if segment.weights_version == version]
    return min(starts) if starts and min(starts) else None


def rest_of(group: GroupResult, wanted: PromptGroup) -> PromptGroup | None:
    """Returns the request to a fresh engine: the prompt and the old tokens, for the remaining number of tokens."""
    start = crossing(group)
    if start is None:
        return None
    context = (*group.prompt_token_ids, *group.samples[0].token_ids[:start])
    return wanted.model_copy(
        update={"token_ids": context, "text": None, "messages": None, "max_tokens": wanted.max_tokens - start}
    )


def certificate(crossed: list[GroupResult], fresh: list[GroupResult], spans: list[dict]) -> dict:
    """Returns `identical`: no old KV was hit, and every token after the update equals the fresh one's. `flips`: samples
    whose tokens part, `compared_tokens`: up to there, where exactness `law` allows them. `unchecked`: samples that
    crossed the update, and have no fresh tokens or no span of their first chunk after it.
    """
    theirs = {group.prompt_id: group.samples[0].token_ids for group in fresh}
    crossing_groups = sum(crossing(group) is not None for group in crossed)
    first, flipped, compared = None, 0, 0
    for group in crossed:
        if group.prompt_id in theirs:
            ours = group.samples[0].token_ids[crossing(group) :]
            pairs = enumerate(zip(ours, theirs[group.prompt_id], strict=False))
            same = min(len(ours), len(theirs[group.prompt_id]))
            at = next((i for i, (a, b) in pairs if a != b), None if len(ours) == len(theirs[group.prompt_id]) else same)
            flipped, compared = flipped + (at is not None), compared + (same if at is None else at + 1)
            if at is not None and first is None:
                first = {"prompt_id": group.prompt_id, "position": crossing(group) + at}
    hits = [span["attributes"] for span in first_chunks(spans)]
    before = [span["attributes"] for span in spans if span["attributes"]["tailrace.weights.version"] != NEW_VERSION]
    stale = sum(hit["tailrace.kv.cached_tokens"] for hit in hits)
    unchecked = max(0, crossing_groups - min(len(theirs), len(hits)))
    return {
        "identical": bool(theirs) and first is None and not stale and not unchecked,
        "samples": len(theirs),
        "unchecked": unchecked,
        "tokens": sum(map(len, theirs.values())),
        "first_difference": first,
        "flips": flipped,
        "compared_tokens": compared,
        "old_kv_hit_tokens": stale,
        "old_kv_pulled_tokens": sum(hit["tailrace.kv.pulled_tokens"] for hit in hits),
        "pulled_tokens_before": sum(chunk["tailrace.kv.pulled_tokens"] for chunk in before),
    }


def first_chunks(spans: list[dict], version: int = NEW_VERSION) -> list[dict]:
    """Returns for every sample that made tokens under older weights and then `version` its first engine call under
    that.
    """
    chunks: dict[str, list[dict]] = {}
    for span in spans:
        chunks.setdefault(span["attributes"]["tailrace.chunk.id"].rpartition(":")[0], []).append(span)
    found = []
    for of_sample in chunks.values():
        of_sample.sort(key=lambda s: int(s["attributes"]["tailrace.chunk.id"].rpartition(":")[2]))
        made = [span for span in of_sample if span["attributes"]["tailrace.chunk.new_tokens"]]
        new = [span for span in made if span["attributes"]["tailrace.weights.version"] == version]
        if new and len(new) < len(made):
            found.append(new[0])
    return found
