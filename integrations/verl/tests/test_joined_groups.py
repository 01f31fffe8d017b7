"""Requests of a group meet, and their tokens depend on nothing that has to do with arrival. In one process."""

import asyncio
import random

import pytest
from stand_in import StandInServer
from tailrace_verl.global_steps import GlobalSteps
from tailrace_verl.replies import SampleFailed, ended, reply
from tailrace_verl.requests import Lengths
from tailrace_verl.settings import Settings

from tailrace.deployments.messages.rollout import SampleResult, Segment
from tailrace.policies.protocol.actions import SampleEnd

VERL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def server() -> StandInServer:
    return StandInServer(Settings(), Lengths(16, 32), seed=5)


async def ask(one: StandInServer, index: int, group: str = "u", prompt=(7, 8), **names):
    return await one.generate(list(prompt), dict(VERL), f"id-{random.random()}", group=group, index=index, **names)


async def test_the_calls_of_a_group_are_one_batch():
    one = server()
    answers = await asyncio.gather(*(ask(one, index, of=4, step=3) for index in range(4)))
    assert await one.sent() == [("u", 4, 3)]
    assert len({tuple(answer.token_ids) for answer in answers}) == 4
    assert len(one._groups) == 0, "taken whole, so nothing is kept"


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3, 0, 2)])
async def test_tokens_do_not_depend_on_the_order_or_on_missing_calls(order):
    reference, other, lone = (server() for _ in range(3))
    expected = [(await ask(reference, index, of=4)).token_ids for index in range(4)]
    got = {}
    for index in order:  # one after the other: each waits for the whole group
        got[index] = (await ask(other, index, of=4)).token_ids
    assert [got[index] for index in range(4)] == expected
    assert (await ask(lone, 2, of=4)).token_ids == expected[2]
    assert (await ask(other, 2, of=4)).token_ids == expected[2], "asked again after the group was taken"


async def test_groups_of_other_prompts_steps_or_settings_do_not_mix():
    one = server()
    await asyncio.gather(ask(one, 0, of=2), ask(one, 1, of=2, step=1), ask(one, 0, of=2, prompt=(9,)))
    assert len(await one.sent()) == 3


async def test_an_error_of_the_service_reaches_every_caller_and_the_next_call_tries_again():
    one = server()
    await one.check()
    one.stand_in.broken = "no replica"
    answers = await asyncio.gather(*(ask(one, index, of=2) for index in range(2)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["no replica"] * 2
    one.stand_in.broken = ""
    assert (await ask(one, 0, of=2)).stop_reason == "completed"


async def test_a_cancelled_call_does_not_end_its_mates():
    one = server()
    first, second = (asyncio.create_task(ask(one, index, of=2)) for index in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).token_ids
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_images_are_refused():
    with pytest.raises(ValueError, match="image_data: not supported"):
        await server().generate([1], dict(VERL), "id", image_data=[object()])


def sample(end: SampleEnd, *versions: int) -> SampleResult:
    segments = tuple(
        Segment(weights_version=version, replica_id="r", start=place, end=place + 1)
        for place, version in enumerate(versions)
    )
    count = len(versions)
    return SampleResult(
        sample_index=0,
        token_ids=tuple(range(count)),
        text="",
        logprobs=(-1.0,) * count,
        raw_logprobs=(-2.0,) * count,
        finish_reason=end,
        error="the engine stopped" if end is SampleEnd.FAILED else None,
        segments=segments,
    )


def test_a_reply_has_the_steps_of_its_first_and_last_weights():
    steps = GlobalSteps()
    for version, step in ((4, 10), (5, 11)):
        steps.record(version, step)
    made = reply(sample(SampleEnd.LENGTH, 4, 4, 5), steps, True, "group")
    fields = made.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (10, 11, 11)
    assert made.log_probs == [-1.0] * 3 and made.stop_reason == "completed" and made.num_preempted == 0
    assert reply(sample(SampleEnd.STOP, 4), steps, False, "group").log_probs is None


def test_a_failed_sample_is_an_error_in_one_line():
    with pytest.raises(SampleFailed, match="sample ended as failed: the engine stopped"):
        ended(sample(SampleEnd.FAILED, 4))
