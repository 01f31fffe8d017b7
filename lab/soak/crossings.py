"""Samples that crossed an update: each stretch after the first, made again by engines that hold its weights alone.

The new prompt is the old one with the tokens before the stretch; position and key are the same, so the tokens must be.
Called by lab/soak/run.py once the faults have ended.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch
from tailrace.lab.soak.answers import UNFINISHED, AnswerBook, Crossed, Stretch, cut
from tailrace.lab.verification.tokens import difference

MAX_CHECKED = 240
"""Maximum number of stretches that are made again, evenly over the soak. The report gives the number of the others."""

AT_ONCE = 16


def request(crossed: Crossed, stretch: Stretch, name: str) -> RolloutBatch:
    """Returns the batch of one group whose last sample makes the stretch."""
    wanted = next(group for group in crossed.batch.groups if group.prompt_id == crossed.group.prompt_id)
    last = stretch is crossed.stretches[-1] and crossed.sample.finish_reason not in UNFINISHED
    group = wanted.model_copy(
        update={
            "token_ids": (*crossed.group.prompt_token_ids, *crossed.sample.token_ids[: stretch.start]),
            "text": None,
            "messages": None,
            "samples": crossed.sample.sample_index + 1,
            "max_tokens": wanted.max_tokens - stretch.start if last else stretch.end - stretch.start,
        }
    )
    changes = {"batch_id": name, "groups": (group,), "weights_version": None}
    return crossed.batch.model_copy(update=changes)


def judge(book: AnswerBook, crossed: Crossed, stretch: Stretch, fresh: GroupResult) -> None:
    """Records a wrong sample if the stretch differs from the fresh one."""
    made = next(one for one in fresh.samples if one.sample_index == crossed.sample.sample_index)
    ours = cut(crossed.sample, stretch.start, stretch.end)
    if stretch.end < len(crossed.sample.token_ids) or crossed.sample.finish_reason in UNFINISHED:
        made = cut(made, 0, stretch.end - stretch.start).model_copy(update={"finish_reason": ours.finish_reason})
    found, _ = difference(made, ours)
    if found:
        position = {"position": stretch.start + found["position"]}
        book.blame(crossed.batch, crossed.group, crossed.sample, {**found, **position})


async def check(client: RolloutClient, folders: Sequence[str], book: AnswerBook, say: Callable[[str], None]) -> dict:
    """Makes stretches again, folder by folder. Returns how many samples crossed, and how many stretches were
    checked.
    """
    wanted = [(one, stretch) for one in book.crossed for stretch in one.stretches[1:]]
    by_weights = defaultdict(list)
    chosen = wanted[:: -(-len(wanted) // MAX_CHECKED) or 1]
    for number, (one, stretch) in enumerate(chosen):
        by_weights[stretch.weights].append((one, stretch, f"soak-crossed-{number}"))
    limit = asyncio.Semaphore(AT_ONCE)

    async def make(one: Crossed, stretch: Stretch, name: str) -> None:
        async with limit:
            async for fresh in client.rollout(request(one, stretch, name)):
                judge(book, one, stretch, fresh)

    version = (await client.status()).weights_version
    for weights, of_weights in sorted(by_weights.items()):
        say(f"making {len(of_weights)} stretches again under weights {weights}")
        version += (weights - version) % len(folders)
        await client.update_weights(version, folders[weights])
        await asyncio.gather(*(make(*each) for each in of_weights))
    return {"samples": len(book.crossed), "checked": len(chosen), "unchecked": len(wanted) - len(chosen)}
