"""A client's single samples over a scripted coordinator: asked once, read once, and ended with their caller."""

import asyncio
from types import SimpleNamespace

import pytest
from scripted_service import Lost, Service, client_of, run

from tailrace.app.calls.refused import (
    QuotaExceeded,
    RolloutRejected,
    StreamBroken,
)
from tailrace.app.calls.session import groups_of_answers
from tailrace.app.calls.single_samples import _beyond
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import Rejected, RejectedBy
from tailrace.deployments.messages.session import SampleTokens


def sample(index: int = 0, **fields):
    segments = (SimpleNamespace(weights_version=3, weights_digest="d"),)
    known = {"token_ids": (), "error": None, "finish_reason": "length", "prompt_logprobs": "logprobs"}
    return SimpleNamespace(sample_index=index, **{"segments": segments} | known | fields)


def ended(group: str = "p", index: int = 0, **fields):
    known = {"batch_id": "b", "prompt_token_ids": (1,), "prompt_key": "key", "step": 4}
    return SimpleNamespace(group=group, sample=sample(index, **fields), **known)


def test_a_score_asks_for_one_token_and_the_logprobs_of_the_prompt():
    service = Service(generate=[ended(), ended(segments=(), error="it is too long"), ended(segments=())])
    session = client_of(service).open("b", seed=7)
    scored = run(session.score((5, 6, 7), top=2, group="s"))
    assert tuple(scored) == ("logprobs", 3, "d")
    ((role, settings, request),) = service.named("generate")
    assert (role, settings.batch_id, settings.seed) == (Role.TRAINER, "b", 7)
    assert (request.index, request.group.prompt_id, request.group.max_tokens) == (0, "s", 1)
    assert request.group.sampling.prompt_logprobs == 2 and request.group.token_ids == (5, 6, 7)
    with pytest.raises(RolloutRejected, match=r"^score of 2 tokens: it is too long$"):
        run(session.score((5, 6)))
    with pytest.raises(RolloutRejected, match=r"^score of 2 tokens: length$"):
        run(session.score((5, 6)))


def test_equal_prompts_are_one_group_whose_samples_are_counted():
    service = Service(generate=[ended()])
    session = client_of(service).open("b")

    async def story():
        for prompt in ((1, 2), (1, 2), (1, 3)):
            await session.generate(prompt)
        await session.generate((1, 2), group="named")
        await session.generate((1, 2), index=9)
        await session.generate((1, 2))

    run(story())
    requests = [request for _, _, request in service.named("generate")]
    names = [request.group.prompt_id for request in requests]
    assert names[0] == names[1] == names[4] == names[5] != names[2] and names[3] == "named"
    assert [request.index for request in requests] == [0, 1, 0, 0, 9, 3]


def test_each_wish_of_a_request_reaches_the_coordinator():
    service = Service(generate=[ended()], cancel_samples=[3])
    session = client_of(service).open("b")
    wishes = {"of": 4, "deadline_s": 2.5, "chunk_tokens": 6, "turn": 2, "hold_s": 1.5}
    run(session.generate((1, 2), index=1, max_tokens=7, adapter="poet", sampling={"temperature": 0.5}, **wishes))
    ((_, _, request),) = service.named("generate")
    assert {name: getattr(request, name) for name in wishes} == wishes and request.index == 1
    assert (request.group.max_tokens, request.group.adapter, request.group.samples) == (7, "poet", 1)
    assert request.group.sampling.temperature == 0.5
    assert run(session.cancel("p", 4)) == 3 and run(session.cancel()) == 3
    assert service.named("cancel_samples") == [(Role.TRAINER, "b", "p", 4), (Role.TRAINER, "b", None, None)]


def test_a_sample_is_asked_for_again_after_a_loss_and_waits_for_its_quota_then_alone():
    quota = Rejected(reason="quota", by=RejectedBy.QUOTA)
    service = Service(generate=[quota])
    with pytest.raises(QuotaExceeded):
        run(client_of(service).open("b").generate((1,)))
    assert len(service.named("generate")) == 1, "refused at once"
    last = ended()
    service = Service(generate=[Lost(), quota, quota, last])
    assert run(client_of(service).open("b").generate((1,))) is last
    assert len({id(request) for _, _, request in service.named("generate")}) == 1, "under the same index"


def test_a_sample_whose_caller_leaves_is_cancelled_and_one_that_ends_is_not():
    async def story():
        service = Service(generate=[ended(), lambda: asyncio.sleep(100.0)])
        session = client_of(service).open("b")
        await session.generate((1,))
        waiting = asyncio.ensure_future(session.generate((1,)))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert [call.cancels for call in service.calls] == [0, 1] and waiting.cancelled()

    run(story())


def test_a_session_that_is_closed_ends_its_samples_and_takes_no_more():
    async def story():
        service = Service(
            generate=[ended(), lambda: asyncio.sleep(100.0), ValueError("odd")],
            close_session=[True],
            renew_session=[None],
        )
        async with client_of(service).open("b") as session:
            for _ in range(3):
                session.submit((1,))
            await asyncio.sleep(1.0)
            service.hearts[0].beat()
        assert service.named("renew_session") == [(Role.TRAINER, "b")] and service.hearts[0].stopped
        assert [call.cancels for call in service.calls[:3]] == [0, 1, 0]
        assert service.named("close_session") == [(Role.TRAINER, "b")]
        with pytest.raises(ValueError, match="session 'b' is closed; open another"):
            await session.generate((1,))

    run(story())


def test_a_session_whose_sample_fails_while_it_closes_is_closed():
    async def failing():
        try:
            await asyncio.sleep(100.0)
        except asyncio.CancelledError:
            raise ValueError("odd") from None

    async def story():
        service = Service(generate=[failing], close_session=[True])
        session = client_of(service).open("b")
        session.submit((1,))
        await asyncio.sleep(1.0)
        await session.close()
        assert service.named("close_session")

    run(story())


def test_submitted_samples_come_as_they_end_and_an_error_costs_its_own_alone():
    async def later(seconds: float, answer):
        await asyncio.sleep(seconds)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def story():
        answers = [ended(index=0), ValueError("odd"), ended(index=2)]
        service = Service(
            generate=[lambda a=a, s=s: later(s, a) for a, s in zip(answers, (3.0, 2.0, 1.0), strict=True)]
        )
        session = client_of(service).open("b")
        for _ in answers:
            session.submit((1,))
        came = []
        with pytest.raises(ValueError, match="odd"):
            async for one in session.samples():
                came.append(one)
        assert came == [answers[2]]
        assert [one async for one in session.samples()] == [answers[0]]
        assert [one async for one in session.samples()] == []

    run(story())


def part(start: int, *token_ids: int, answer=None, prompt=None) -> SampleTokens:
    return SampleTokens.model_construct(
        start=start, token_ids=token_ids, answer=answer, prompt_token_ids=prompt, logprobs=(), raw_logprobs=(),
        top_logprobs=(), sampling_mask=(),
    )  # fmt: skip


def test_a_stream_goes_on_after_a_loss_with_the_tokens_that_have_not_come():
    last = ended(token_ids=(1, 2, 3, 4))
    quota = Rejected(reason="quota", by=RejectedBy.QUOTA)
    service = Service(
        stream_sample=[
            [part(0, prompt=(9,)), part(0, 1, 2), Lost()],
            [part(0, prompt=(9,)), part(0, 1, 2, 3)],
            [quota],
            [part(0, 1, 2, 3, 4, answer=last)],
        ]
    )

    async def story():
        session = client_of(service).open("b")
        return [(one.start, one.token_ids, one.answer) async for one in session.stream((1,), chunk_tokens=5)]

    assert run(story()) == [(0, (), None), (0, (1, 2), None), (2, (3,), None), (3, (4,), last)]
    assert {request.chunk_tokens for _, _, request in service.named("stream_sample")} == {5}
    assert all(call.cancels == 1 for call in service.calls)
    service.answers["stream_sample"] = [[quota]]
    with pytest.raises(QuotaExceeded):
        run(story())
    assert len(service.calls) == 5, "one that was never taken is not asked for again"


@pytest.mark.parametrize(
    ("given", "item"),
    [
        ([1, 2], part(3, 4)),
        ([1, 2], part(1, 3)),
        ([1, 2], part(0, 2, 2)),
        ([1, 2], part(2, answer=ended(token_ids=(1,)))),
        ([1, 2], part(2, answer=ended(token_ids=(1, 3)))),
    ],
)
def test_a_stream_with_other_tokens_than_were_given_is_broken(given, item):
    with pytest.raises(StreamBroken, match="has other tokens now"):
        _beyond(given, item)


@pytest.mark.parametrize(
    ("given", "item", "start", "token_ids"),
    [
        ([1, 2], part(2, 3), 2, (3,)),
        ([1, 2], part(1, 2, 3), 2, (3,)),
        ([1, 2], part(0, 1), 2, ()),
        ([1, 2], part(2, answer=ended(token_ids=(1, 2))), 2, ()),
        ([], part(0, 5), 0, (5,)),
    ],
)
def test_the_rest_of_an_item_is_given(given, item, start, token_ids):
    rest = _beyond(given, item)
    assert rest.token_ids == token_ids and rest.start == start


def test_groups_have_their_own_answers_in_the_order_of_their_indexes(monkeypatch):
    from tailrace.app.calls import session

    monkeypatch.setattr(session, "GroupResult", SimpleNamespace)
    answers = [ended("q", 1), ended("p", 2), ended("q", 0), ended("p", 0), ended("alone", 5)]
    found = groups_of_answers(answers)
    assert list(found) == ["q", "p", "alone"] and len(found["alone"].samples) == 1
    assert [one.sample_index for one in found["q"].samples] == [0, 1]
    assert [one.sample_index for one in found["p"].samples] == [0, 2]
    whole = found["p"]
    assert (whole.batch_id, whole.prompt_id, whole.prompt_token_ids, whole.prompt_key, whole.step) == (
        "b", "p", (1,), "key", 4,
    )  # fmt: skip
