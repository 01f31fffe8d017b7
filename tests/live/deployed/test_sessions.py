"""Open sessions on a real service: the same samples as a batch and one by one have the same tokens."""

import asyncio
from random import Random

import pytest
from waiting import until

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch, SamplingParams
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import SampleEnd

SAMPLING = SamplingParams(temperature=0.9, top_p=0.95)


def test_single_requests_in_any_order_have_the_tokens_of_a_batch(client):
    groups = tuple(
        PromptGroup(prompt_id=f"p{n}", text=f"The number {n} is", samples=4, max_tokens=48, sampling=SAMPLING)
        for n in range(4)
    )
    batch = RolloutBatch(batch_id="as a batch", groups=groups, seed=11, step=5)
    expected = {
        (group.prompt_id, sample.sample_index): sample.token_ids
        for group in client.rollout_blocking(batch)
        for sample in group.samples
    }

    async def one_by_one() -> dict:
        wanted = [(group, index) for group in groups for index in range(group.samples)]
        Random(2).shuffle(wanted)
        async with client.open(seed=11, step=5) as session:
            for group, index in wanted:
                session.submit(text=group.text, group=group.prompt_id, index=index, max_tokens=48, sampling=SAMPLING)
            return {(one.group, one.sample.sample_index): one.sample async for one in session.samples()}

    samples = asyncio.run(one_by_one())
    assert {name: sample.token_ids for name, sample in samples.items()} == expected
    assert len(expected) == 16 and all(len(one.logprobs) == len(one.token_ids) for one in samples.values())
    assert client.status_blocking().batches == ()


@pytest.mark.parametrize("split", [1, 17, 39])
def test_a_sample_in_two_turns_has_the_tokens_that_it_has_in_one(client, split):
    async def story() -> tuple:
        async with client.open(seed=4) as session:
            asked = {"group": "turns", "index": 3, "sampling": SamplingParams(stop_token_ids=(0,))}
            whole = await session.generate(text="Once upon a time", max_tokens=40, **asked)
            first = await session.generate(text="Once upon a time", max_tokens=split, **asked)
            context = (*first.prompt_token_ids, *first.sample.token_ids)
            then = await session.generate(context, max_tokens=40 - split, **asked)
            return whole.sample.token_ids, first.sample.token_ids, then.sample.token_ids

    whole, first, then = asyncio.run(story())
    assert len(first) == split and len(whole) > split, "it ended too soon to be split"
    assert whole == first + then


def test_a_cancelled_call_and_a_deadline_end_their_samples(client):
    """Of 3,900 tokens, one a step: no machine makes them before the deadline."""

    async def story() -> tuple[SampleEnd, int]:
        await client.set_policies(Policies(drafting="off"))
        async with client.open(seed=1) as session:
            long = {"text": "1, 2, 3, 4, 5,", "max_tokens": 3_900, "sampling": {"ignore_eos": True}}
            left = asyncio.ensure_future(session.generate(**long))
            while not (await client.status()).running:
                await asyncio.sleep(0.05)
            left.cancel()
            answer = await session.generate(**long, deadline_s=2.0)
            return answer.sample.finish_reason, answer.sample.sample_index

    assert asyncio.run(asyncio.wait_for(story(), 900)) == (SampleEnd.CANCELLED, 1)
    until(lambda: client.status_blocking().running == 0)


def test_an_observer_may_not_ask_for_samples(client):
    observer = RolloutClient(role="observer")
    with pytest.raises(PermissionError, match=r"^generate needs role evaluator, and this client is observer$"):
        asyncio.run(observer.open().generate(text="Hello"))
