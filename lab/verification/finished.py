"""The update certificate by `kv_on_update: finish`: samples end under the weights that they began with.

The same requests run four times: before the update, across it, at once after it while older samples still run, and once
all replicas hold the new weights. Samples across it must have one version and the tokens of those before; samples right
after it one version and the tokens of the last. The last must have other tokens than the first: else a load that
changed the version alone would pass. Called by `tailrace verify`.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import DEPLOY_S, service
from tailrace.app.config import ServeFile
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, SampleResult
from tailrace.lab.verification.runs import chunked
from tailrace.lab.verification.weights_update import CHUNK_TOKENS
from tailrace.policies.families.registry import Policies

POLL_S = 0.05
"""Seconds between looks at the service: a chunk of the smallest model takes longer."""


class FinishedRolls(NamedTuple):
    """Groups of the four runs. `in_flight`: samples of the second one that had not returned at the update's end."""

    before: list[GroupResult]
    across: list[GroupResult]
    right_after: list[GroupResult]
    after: list[GroupResult]
    in_flight: int


def measure(file: ServeFile, batch: RolloutBatch, weights: Path, say: Callable[[str], None]) -> dict:
    """Rolls out a sample of each prompt four times on two replicas, whose weights change to those of a folder."""
    groups = tuple(group.model_copy(update={"samples": 1}) for group in batch.groups)
    say("starting two replicas, to change their weights under way (kv_on_update: finish)")
    with service(file, None) as client:
        rolls = rolled(client, batch.model_copy(update={"groups": groups}), str(weights))
        return certificate(asyncio.run(rolls))


async def rolled(client: RolloutClient, batch: RolloutBatch, weights: str) -> FinishedRolls:
    """Runs the batch four times, and changes the weights in the second run. Raises TimeoutError if a replica does not
    have the new weights DEPLOY_S after the older samples have ended.
    """
    await client.set_policies(Policies(**chunked(CHUNK_TOKENS, "goodput", "round_robin"), kv_on_update="finish"))
    wanted = (await client.status()).weights_version + 1
    before, across = await _roll(client, batch, "before"), []
    rolling = asyncio.create_task(_roll(client, batch, "across", across))
    total = sum(len(sample.token_ids) for group in before for sample in group.samples)
    while not rolling.done() and sum(one.tokens for one in (await client.status()).batches) < total / 3:
        await asyncio.sleep(POLL_S)
    await client.update_weights(wanted, weights)
    in_flight = sum(group.samples for group in batch.groups) - sum(len(group.samples) for group in across)
    right_after = await _roll(client, batch, "right-after")
    await rolling
    async with asyncio.timeout(DEPLOY_S):
        while any(one.weights_version != wanted for one in (await client.status()).replicas):
            await asyncio.sleep(POLL_S)
    return FinishedRolls(before, across, right_after, await _roll(client, batch, "after"), in_flight)


async def _roll(client: RolloutClient, batch: RolloutBatch, name: str, into: list | None = None) -> list[GroupResult]:
    """Returns the groups of a run. `into`: gets them as they come."""
    groups = [] if into is None else into
    async for group in client.rollout(batch.model_copy(update={"batch_id": f"verify-finish-{name}"})):
        groups.append(group)
    return groups


def certificate(rolls: FinishedRolls) -> dict:
    """Returns `identical`: samples were in flight at the update, none is `mixed` or `unchecked`, and all tokens are
    those of their version alone, and `changed` is not 0. `unchecked`: samples that one run of two has. `changed`:
    samples with other tokens after the update than before. `flips`, `compared_tokens`: as in the other update
    certificate.
    """
    first, flipped, compared, mixed, unchecked = None, 0, 0, 0, 0
    for alone, others in ((rolls.before, rolls.across), (rolls.after, rolls.right_after)):
        expected, found = _samples(alone), _samples(others)
        unchecked += len(expected.keys() ^ found.keys())
        for prompt_id, index in sorted(expected.keys() & found.keys()):
            sample, theirs = found[prompt_id, index], expected[prompt_id, index]
            at = _parts_at(theirs.token_ids, sample.token_ids)
            mixed += _versions(sample) != _versions(theirs) or len(_versions(sample)) > 1
            flipped, compared = flipped + (at is not None), compared + (len(sample.token_ids) if at is None else at + 1)
            if at is not None and first is None:
                first = {"prompt_id": prompt_id, "sample_index": index, "position": at}
    old, new = _samples(rolls.before), _samples(rolls.after)
    changed = sum(old[place].token_ids != new[place].token_ids for place in old.keys() & new.keys())
    return {
        "identical": first is None and not mixed and not unchecked and changed > 0 and rolls.in_flight > 0,
        "samples": rolls.in_flight,
        "changed": changed,
        "mixed": mixed,
        "unchecked": unchecked,
        "first_difference": first,
        "flips": flipped,
        "compared_tokens": compared,
        "old_kv_hit_tokens": 0,
    }


def _samples(groups: list[GroupResult]) -> dict[tuple[str, int], SampleResult]:
    return {(group.prompt_id, one.sample_index): one for group in groups for one in group.samples}


def _versions(sample: SampleResult) -> set[int]:
    return {segment.weights_version for segment in sample.segments}


def _parts_at(one, other) -> int | None:
    """Returns the first position at which two answers differ, or None."""
    differing = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, None if len(one) == len(other) else min(len(one), len(other)))
