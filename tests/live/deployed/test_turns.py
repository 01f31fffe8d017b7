"""Turns on a real service: a held sample has the tokens of turns asked for alone, and computes little again."""

import asyncio
from itertools import pairwise

import pytest

from tailrace.app.calls.session import RolloutSession
from tailrace.deployments.messages.session import SampleAnswer

BLOCK_TOKENS = 32
TURNS = 3
TOOL = tuple(range(1000, 1040))
SAMPLING = {"temperature": 0.9, "stop": [" the"]}


async def trajectory(session: RolloutSession, index: int, hold_s: float) -> list[SampleAnswer]:
    context, answers = tuple(range(500, 700)), []
    for turn in range(TURNS):
        given = {"group": "tools", "index": index, "turn": turn, "max_tokens": 40, "sampling": SAMPLING}
        answers.append(await session.generate(context, **given, hold_s=hold_s if turn + 1 < TURNS else 0.0))
        context = (*answers[-1].prompt_token_ids, *answers[-1].sample.token_ids, *TOOL)
        await asyncio.sleep(0.2)
    return answers


@pytest.mark.long
def test_held_turns_have_the_tokens_of_others_and_compute_at_most_a_block_a_chunk_again(client):
    """And one more where a stop text ended the turn before: a block with drafts beyond it fits no later context."""

    async def story() -> tuple:
        async with client.open(seed=8) as session:
            held = await asyncio.gather(*(trajectory(session, index, 60.0) for index in range(4)))
            held_now = (await client.status()).waiting
        await client.reset_caches()
        async with client.open(seed=8) as session:
            alone = [await trajectory(session, index, 0.0) for index in range(4)]
        return held, alone, held_now

    held, alone, held_now = asyncio.run(story())
    assert [[one.sample.token_ids for one in answers] for answers in held] == [
        [one.sample.token_ids for one in answers] for answers in alone
    ]
    for answers in held:
        for before, after in pairwise(answers):
            computed = len(before.prompt_token_ids) + len(before.sample.token_ids) - 1
            again = after.sample.computed_tokens - (len(after.prompt_token_ids) - computed) - (after.sample.chunks - 1)
            assert 0 <= again <= BLOCK_TOKENS * (after.sample.chunks + (before.sample.stop_reason == " the"))
    assert held_now == 0 and client.status_blocking().batches == ()
