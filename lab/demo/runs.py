"""The two runs of the demo: the same prompts under the same seed on one service, by static groups and as configured.

Invariant: before each run all caches and the history of earlier runs are cleared, so the second run gains nothing from
the first. Called by `tailrace demo`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tailrace.app.calls.client import RolloutClient
from tailrace.app.config import ServeFile
from tailrace.app.errors import Failed
from tailrace.app.progress import RolloutProgress
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch
from tailrace.policies.families.registry import Policies

STATIC_POLICIES = {
    "ordering": "group_static",
    "placement": "pinned",
    "chunking": {"type": "fixed", "chunk_tokens": None},
    "drafting": "off",
}
"""Policies that bind whole groups to a replica at the start, and send each sample in one piece."""


class DemoRun(NamedTuple):
    """`journal`: the core's journal as text. `groups`: results of all groups."""

    journal: str
    groups: tuple[GroupResult, ...]


def policies_of(file: ServeFile) -> dict[str, Policies]:
    """Returns the policies of each run by its name, the baseline first."""
    configured = file.application.policies
    return {"static": Policies(**STATIC_POLICIES), "tailrace": configured}


async def roll_out(
    client: RolloutClient,
    policies: Mapping[str, Policies],
    prompts: Sequence[PromptGroup],
    say: Callable[[int, str], None],
) -> dict[str, DemoRun]:
    """Rolls out the prompts under each of `policies`, one after the other. Returns the runs by name. Raises Failed if
    other batches were in flight.

    `say`: called with the number of the step, from 2, and the name of the run.
    """
    runs = {}
    for step, (name, chosen) in enumerate(policies.items(), start=2):
        say(step, name)
        await client.set_policies(chosen)
        await client.reset_caches()
        await client.forget_history()
        await client.journal(True)
        batch = RolloutBatch(batch_id=f"demo-{name}", groups=tuple(prompts))
        groups = await _followed(client, batch)
        journal = await client.journal(False)
        if journal is None:
            raise Failed("other batches were in flight; a demo needs a service of its own")
        runs[name] = DemoRun(journal, groups)
    return runs


async def _followed(client: RolloutClient, batch: RolloutBatch) -> tuple[GroupResult, ...]:
    """Returns the groups of a batch, and shows its progress on stderr."""
    samples = sum(prompt.samples for prompt in batch.groups)
    follower = asyncio.create_task(RolloutProgress(client, batch.batch_id, samples).follow())
    try:
        return tuple([group async for group in client.rollout(batch)])
    finally:
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower


def same_samples(one: Sequence[GroupResult], other: Sequence[GroupResult]) -> int:
    """Returns the number of samples whose tokens are the same in both runs."""

    def tokens_of(groups: Sequence[GroupResult]) -> dict[tuple[str, int], tuple[int, ...]]:
        return {
            (group.prompt_id, each.sample_index): tuple(each.token_ids) for group in groups for each in group.samples
        }

    first, second = tokens_of(one), tokens_of(other)
    return sum(second.get(name) == tokens for name, tokens in first.items())
