"""Ways to ask for the samples of a batch that must not matter: one by one in any order, and in two turns.

Each gives the groups of the batch, as if it had been rolled out whole. Called by lab/verification/tokens.py.
"""

import asyncio
from random import Random

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.session import RolloutSession, groups_of_answers
from tailrace.app.http.client import Client
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch, SampleResult
from tailrace.deployments.messages.session import SampleAnswer
from tailrace.policies.protocol.actions import SampleEnd

HOLD_S = 30.0

SEED = 0
"""Seed of the order of requests and the places of splits."""


async def one_by_one(client: RolloutClient, batch: RolloutBatch) -> list[GroupResult]:
    """Asks for every sample by a separate request, in random order, all at once."""
    async with opened(client, batch) as session:
        for group, index in shuffled(batch):
            submit(session, group, index)
        return list(groups_of_answers([answer async for answer in session.samples()]).values())


async def in_two_turns(client: RolloutClient, batch: RolloutBatch) -> list[GroupResult]:
    """Asks for every sample in two turns, split at a random place: the second one's prompt ends with the first one's
    tokens. Every other one is held between them.
    """
    rng = Random(SEED)
    async with opened(client, batch) as session:
        turns = [
            two_turns(session, group, index, rng.randint(1, max(1, group.max_tokens - 1)), HOLD_S * (index % 2))
            for group in batch.groups
            for index in range(group.samples)
        ]
        return list(groups_of_answers(await asyncio.gather(*turns)).values())


async def two_turns(
    session: RolloutSession, group: PromptGroup, index: int, split: int, hold_s: float
) -> SampleAnswer:  # fmt: skip
    """Asks for one sample, whose first turn ends at `split` tokens, and is held for `hold_s` seconds."""
    settings = settings_of(group, index)
    first = await session.generate(**prompt_of(group), **settings, max_tokens=split, hold_s=hold_s)
    left = group.max_tokens - len(first.sample.token_ids)
    if first.sample.finish_reason is not SampleEnd.LENGTH or not left:
        if hold_s:
            await session.cancel(group.prompt_id, index)  # no further turn comes
        return first
    context = (*first.prompt_token_ids, *first.sample.token_ids)
    then = await session.generate(context, **settings, max_tokens=left)
    return first.model_copy(update={"sample": joined_turns(first.sample, then.sample)})


def joined_turns(first: SampleResult, then: SampleResult) -> SampleResult:
    """Returns the sample of two turns as one: its tokens, their logprobs, and its counts."""
    split = len(first.token_ids)
    shifted = [
        segment.model_copy(update={"start": segment.start + split, "end": segment.end + split})
        for segment in then.segments
    ]
    sums = ("chunks", "verifications", "drafted_tokens", "accepted_tokens")
    joined = ("token_ids", "logprobs", "raw_logprobs")
    return then.model_copy(
        update={name: getattr(first, name) + getattr(then, name) for name in (*sums, *joined)}
        | {
            "segments": (*first.segments, *shifted),
            "close_calls": (*first.close_calls, *(place + split for place in then.close_calls)),
        }
    )


def shuffled(batch: RolloutBatch) -> list[tuple[PromptGroup, int]]:
    """Returns every sample's group and index, in random order."""
    wanted = [(group, index) for group in batch.groups for index in range(group.samples)]
    Random(SEED).shuffle(wanted)
    return wanted


def submit(session: RolloutSession, group: PromptGroup, index: int) -> None:
    session.submit(**prompt_of(group), **settings_of(group, index), max_tokens=group.max_tokens)


def opened(client: RolloutClient | Client, batch: RolloutBatch) -> RolloutSession:
    return client.open(batch.batch_id, seed=batch.seed, step=batch.step)


def prompt_of(group: PromptGroup) -> dict:
    """Returns the prompt as a request takes it."""
    messages = None if group.messages is None else [message.model_dump() for message in group.messages]
    return {"token_ids": group.token_ids, "text": group.text, "messages": messages}


def settings_of(group: PromptGroup, index: int) -> dict:
    return {"group": group.prompt_id, "index": index, "sampling": group.sampling, "adapter": group.adapter}
