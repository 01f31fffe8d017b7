"""Both ends of a gateway's line over real encrypted sockets: calls, streams, leaving, silence and replacement."""

import asyncio
from contextlib import aclosing
from functools import partial

import numpy as np
import pytest

from tailrace.deployments.channel import call_frames as frames
from tailrace.deployments.channel import call_line, call_lines
from tailrace.deployments.channel.call_line import CallFailed, CallLine
from tailrace.deployments.channel.call_lines import CallLines
from tailrace.deployments.channel.sockets import DialledSocket, ListeningSocket
from tailrace.deployments.messages.roles import Passed, Role
from tailrace.deployments.messages.rollout import BatchSettings, PromptGroup, Rejected, SampleResult
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest, SampleTokens
from tailrace.deployments.messages.trajectory import PromptImage, TrajectoryOpening, TrajectoryState, TrajectoryTurn
from tailrace.deployments.results.columns import Column
from tailrace.deployments.results.routed_experts import RoutedExperts

SETTINGS = BatchSettings(batch_id="s", seed=3, min_adapter_versions={"a": 2})
REQUEST = SampleRequest(group=PromptGroup(prompt_id="g", token_ids=(5, 6), samples=1), index=7)
SAMPLE = SampleResult(
    sample_index=7,
    token_ids=[1, 2],
    text="ä",
    logprobs=Column(np.array([-0.1, -np.inf], np.float32)),
    raw_logprobs=[-0.3, 0.1],
    finish_reason="stop",
    top_logprobs=(((1, -0.1), (2, -float("inf"))), ((2, -0.5),)),
    routed_experts=RoutedExperts(np.arange(12, dtype=np.uint8).reshape(3, 2, 2)),
)
ANSWER = SampleAnswer(batch_id="s", group="g", prompt_token_ids=[5, 6], prompt_key="k", step=0, sample=SAMPLE)


class Ingress:
    """Methods of a coordinator. `answer`: awaited or returned by `generate`."""

    generate = Passed(Role.EVALUATOR, lambda me: me._generate)
    stream_sample = Passed(Role.EVALUATOR, lambda me: me._stream, is_stream=True)

    def __init__(self):
        self.made, self.left, self.hold = [], 0, None

    async def _generate(self, settings, request):
        self.made.append((settings, request))
        await self._held()
        return ANSWER

    async def _stream(self, settings, request):
        yield SampleTokens(start=0, token_ids=(1,))
        await self._held()
        yield SampleTokens(start=1, answer=ANSWER)

    async def _held(self):
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        if isinstance(self.hold, type(None)) and getattr(self, "error", None):
            raise self.error


class Ends:
    """Coordinator's and gateway's end of one line."""

    def __init__(self, role=Role.EVALUATOR):
        self.ingress, self.asked = Ingress(), 0
        self.lines = CallLines(self.ingress, partial(ListeningSocket, "127.0.0.1"))
        self._beats = asyncio.ensure_future(self.lines.run())
        address, self.session = self.lines.open("")
        self.line = CallLine(role, lambda take: DialledSocket(address, self.session, take), self._lives)

    async def _lives(self):
        self.asked += 1
        return self.lines.open(self.session)[1] == self.session

    def generate(self):
        return asyncio.ensure_future(self.line.ask("generate", (SETTINGS, REQUEST)))

    def stop_beats(self):
        self._beats.cancel()


def run(story, **options):
    async def bounded():
        async with asyncio.timeout(120):
            await story(Ends(**options))

    asyncio.run(bounded())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_a_call_carries_its_messages_bit_by_bit():
    async def story(ends):
        answer = await ends.generate()
        assert ends.ingress.made == [(SETTINGS, REQUEST)]
        assert answer == ANSWER and answer.sample.logprobs.array.dtype == np.float32
        assert answer.sample.top_logprobs == SAMPLE.top_logprobs

    run(story)


def test_turns_of_a_trajectory_travel_with_their_images():
    image = PromptImage(name="a", offset=1, length=2, sent=bytes(range(256)))
    turn = TrajectoryTurn(
        parent=None, turn=0, conversation=b"c", message=b"m", closing=None, prompt_token_ids=(1, 7, 7), token_ids=(2,),
        logprobs=(-1.0,), versions=((0, 0, 1),), finish_reason="stop", reencoded_tokens=0, prompt_key="k",
        images=(image,),
    )  # fmt: skip
    opening = TrajectoryOpening(trajectory_id="t", key_digest="0", settings=SETTINGS, group="g")
    state = TrajectoryState(opening=opening, turns=(turn, turn), epoch="e")
    for value in (turn, state):
        found = frames.decode(frames.encode(frames.Item(1, frames.named(value)))).value
        assert frames.given(found) == value


def test_a_thousand_calls_at_once_are_all_answered():
    async def story(ends):
        assert await asyncio.gather(*(ends.generate() for _ in range(1000))) == [ANSWER] * 1000
        await ends.lines.close()

    run(story)


def test_a_stream_s_items_come_in_order_and_end():
    async def story(ends):
        async with aclosing(ends.line.stream("stream_sample", (SETTINGS, REQUEST))) as items:
            first, last = [item async for item in items]
        assert first.token_ids == (1,) and last.answer == ANSWER

    run(story)


def test_a_role_without_the_right_is_refused_as_by_ray():
    async def story(ends):
        assert isinstance(await ends.generate(), Rejected)
        items = [item async for item in ends.line.stream("stream_sample", (SETTINGS, REQUEST))]
        assert len(items) == 1 and isinstance(items[0], Rejected)

    run(story, role=Role.OBSERVER)


def test_a_caller_that_leaves_cancels_its_call():
    async def story(ends):
        ends.ingress.hold = asyncio.Event()
        call = ends.generate()
        await until(lambda: ends.ingress.made)
        call.cancel()
        async with aclosing(ends.line.stream("stream_sample", (SETTINGS, REQUEST))) as items:
            await anext(items)
        await until(lambda: ends.ingress.left == 2)

    run(story)


def test_an_error_of_a_call_reaches_its_caller_alone():
    async def story(ends):
        ends.ingress.error = KeyError("a row")
        with pytest.raises(CallFailed, match="KeyError: 'a row'"):
            await ends.generate()
        with pytest.raises(CallFailed, match="set_policies is not called over a line"):
            await ends.line.ask("set_policies", ({},))
        ends.ingress.error = None
        assert await ends.generate() == ANSWER

    run(story)


def test_a_message_that_a_line_does_not_carry_is_refused_at_once():
    async def story(ends):
        with pytest.raises(TypeError, match="SampleResult is not carried"):
            await ends.line.ask("generate", (SAMPLE,))
        long = SampleRequest(group=PromptGroup(prompt_id="g", token_ids=(5, 6), samples=1, max_tokens=2**64))
        with pytest.raises(ValueError, match="a number has more than 64 bits"):  # answered with status 400
            await ends.line.ask("generate", (SETTINGS, long))
        with pytest.raises(ValueError, match="another release"):
            frames.given({"SampleResult": {}})

    run(story)


def test_a_line_that_the_coordinator_has_lost_ends_its_calls(monkeypatch):
    monkeypatch.setattr(call_line, "DOUBT_S", 0.2)
    monkeypatch.setattr(call_line, "BEAT_S", 0.1)

    async def story(ends):
        ends.ingress.hold = asyncio.Event()
        call = ends.generate()
        await until(lambda: ends.ingress.made)
        ends.stop_beats()
        await until(lambda: ends.asked > 1)
        assert not call.done(), "silent, and alive by Ray's word"
        ends.session = "gone"
        with pytest.raises(ConnectionError):
            await call
        assert not ends.line.is_open

    run(story)


def test_a_silent_gateway_s_calls_are_cancelled(monkeypatch):
    monkeypatch.setattr(call_lines, "SILENT_S", 60.0)
    monkeypatch.setattr(call_lines, "BEAT_S", 0.1)
    monkeypatch.setattr(call_line, "BEAT_S", 0.1)

    async def story(ends):
        ends.ingress.hold = asyncio.Event()
        call = ends.generate()
        await until(lambda: ends.ingress.made)
        (line,) = ends.lines._lines.values()
        for _ in range(3):
            before_s = line.heard_s
            await until(lambda before_s=before_s: line.heard_s > before_s)
        assert not ends.ingress.left, "its beats arrive"
        ends.line._following.cancel()
        monkeypatch.setattr(call_lines, "SILENT_S", 0.3)
        await until(lambda: ends.ingress.left == 1)
        with pytest.raises(ConnectionError):  # as from a lost coordinator, so that it is made again
            await call
        assert not ends.line.is_open

    run(story)


def test_a_coordinator_that_ends_waits_for_its_calls_and_takes_no_more():
    async def story(ends):
        ends.ingress.hold = asyncio.Event()
        call = ends.generate()
        await until(lambda: ends.ingress.made)
        closing = asyncio.ensure_future(ends.lines.close())
        await asyncio.sleep(0)
        with pytest.raises(ConnectionError, match="being replaced"):
            await ends.generate()
        assert not ends.line.is_open and not closing.done()
        ends.ingress.hold.set()
        assert await call == ANSWER
        await closing

    run(story)
