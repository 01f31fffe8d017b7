"""What engines and drafters say to each other comes through whole, or not at all; and what an engine makes of it."""

import contextlib

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack, structs

from tailrace.deployments.channel.encrypted import Address, listen
from tailrace.deployments.drafter.client import Drafters, rank
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.drafter.lines import end_of, remaining
from tailrace.deployments.drafter.server import say
from tailrace.deployments.drafter.wire import MAX_TOKENS, Confirm, Guess, Open, Stepped, Stop, Unknown, decode, encode
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import GroupRef, Source
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.policies.families.drafting import FixedBudget
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.performance import chance

CONTEXT = np.arange(100, 110, dtype=np.int32)
WISH = Open("s", 2**64 - 1, 0.7, 1.0, 0, 0.0, [3], 8, 40, 4, True, CONTEXT)


@pytest.mark.parametrize("tokens", [CONTEXT.astype(np.int64), np.broadcast_to(np.int32(1), MAX_TOKENS + 1)])
def test_a_context_of_another_type_or_beyond_every_model_is_refused(tokens):
    with pytest.raises(ValueError, match=r"^tokens: "):
        structs.replace(WISH, tokens=tokens)


def test_every_message_comes_through():
    others = [Confirm("s", 10, [1, 2]), Stop("s"), Guess("s", 12, [], 0, 0), Unknown("s"), Stepped(4, 900)]
    wish, *rest = decode(encode([WISH, *others]))
    assert rest == others
    assert structs.astuple(wish)[:-1] == structs.astuple(WISH)[:-1] and wish.terms == WISH.terms
    np.testing.assert_array_equal(wish.tokens, CONTEXT)


@pytest.mark.parametrize(
    "said",
    [
        5,
        [5],
        [["Other", "s"]],
        [[1, "s", 3, []]],
        [["Confirm", "s", 3]],
        [["Confirm", "s", "3", []]],
        [["Confirm", "s", 3, ["x"]]],
        [["Confirm", "s", 3, [], 0]],
        [["Open", "s"]],
        [[]],
        *([["Open", *structs.astuple(WISH)[:-1], tokens]] for tokens in ([1, b"1234"], [9, b""], [0, b"123"], b"1234")),
    ],
)
def test_anything_else_is_refused(said):
    with pytest.raises(ValueError, match="not a frame of drafting messages"):
        decode(msgpack.encode(said))


@given(st.binary(max_size=60))
def test_no_bytes_do_harm(frame):
    with contextlib.suppress(ValueError):
        decode(frame)


@given(st.lists(st.integers(0, 1), max_size=8), st.lists(st.integers(0, 1), max_size=8))
def test_a_guess_counts_as_far_as_it_agrees(guess, tokens):
    left = remaining(guess, tokens)
    assert left == [] or tokens + left == guess


def test_when_a_drafter_goes_only_its_samples_move():
    drafters = [Address(f"tcp://127.0.0.1:{port}", b"") for port in range(5)]
    samples = [f"b/p#{index}" for index in range(200)]
    before = {sample: max(drafters, key=lambda a: rank(sample, a)) for sample in samples}
    after = {sample: max(drafters[1:], key=lambda a: rank(sample, a)) for sample in samples}
    assert all(after[sample] == before[sample] for sample in samples if before[sample] != drafters[0])
    assert 10 < sum(address == drafters[2] for address in after.values()) < 120


class Drafter:
    """The other end of an engine's line: what it heard, and what it says."""

    def __init__(self, context: zmq.Context):
        self.socket = context.socket(zmq.ROUTER)
        self.address = listen(self.socket, "127.0.0.1")
        self.peer = None

    def hear(self) -> list:
        assert self.socket.poll(60_000)
        self.peer, frame = self.socket.recv_multipart()
        return decode(frame)

    def say(self, *messages) -> None:
        say(self.socket, self.peer, list(messages))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextlib.contextmanager
def line_of(clock):
    """An engine's Drafters, a drafter on the other end, and a chunk."""
    with zmq.Context() as context:
        other = Drafter(context)
        drafters = Drafters(DrafterConfig(model="m"), clock)
        plan = DraftPlan(GroupRef("b/p", "key"), 0, 0, 60, (0, 0), FixedBudget(tokens=4))
        chunk = ChunkRequest("c", 7, CONTEXT, 8, 30, SamplingParams(), 0, draft=plan)
        yield drafters, other, chunk
        drafters.stop()
        other.socket.close()


@pytest.fixture
def line():
    with line_of(Clock()) as made:
        yield made


def until(drafters: Drafters, done) -> None:
    while not done():
        drafters.exchange()


def test_an_engine_opens_confirms_and_takes_only_guesses_that_fit(line):
    drafters, other, chunk = line
    drafters.open(chunk, None)  # before any drafter is met
    drafters.meet([other.address])
    drafters.exchange()
    (wish,) = other.hear()
    assert (wish.key, wish.window, wish.coupled, wish.end) == (7, 4, False, end_of(chunk)) == (7, 4, False, 39)
    drafters.made("c", [1, 2])
    other.say(Guess(wish.name, 10, [1, 2, 3, 4], 0, 0))
    until(drafters, lambda: len(drafters.proposal("c").tokens))
    assert other.hear() == [Confirm(wish.name, 10, [1, 2])]
    proposal = drafters.proposal("c")
    assert proposal.tokens.tolist() == [3, 4] and proposal.sources.tolist() == [Source.MODEL] * 2
    other.say(Guess(wish.name, 10, [1, 5, 6], 0, 0), Guess("gone", 0, [1], 0, 0), Guess(wish.name, 99, [1], 0, 0))
    until(drafters, lambda: drafters.counts().get("model_overtaken"))
    assert drafters.proposal("c").tokens.tolist() == [3, 4], "one that was overtaken changes nothing"
    other.say(Stepped(1, 2_000), Stepped(8, 4_000), Guess(wish.name, 12, [3, 4], 9, 6))
    until(drafters, drafters.performance.acceptance.report)
    assert drafters.performance.drafter_steps.cost().at([1, 8]).tolist() == [0.002, 0.004]
    assert drafters.proposal("c").right.tolist() == pytest.approx([chance(6, 9, chance(6, 9))] * 2)
    drafters.made("c", [3, 9])
    assert drafters.proposal("c").tokens.tolist() == []
    drafters.close("c")
    assert other.hear() == [Confirm(wish.name, 12, [3, 9]), Stop(wish.name)]


def test_a_drafter_that_was_born_again_is_told_everything(line):
    drafters, other, chunk = line
    drafters.meet([other.address])
    drafters.exchange()
    drafters.open(chunk, None)
    (wish,) = other.hear()
    assert wish.tokens.tolist() == CONTEXT.tolist(), "told at once, before a step has computed the context"
    drafters.made("c", [1])
    drafters.exchange()
    assert other.hear() == [Confirm(wish.name, 10, [1])]
    other.say(Unknown(wish.name), Unknown(wish.name))  # it may say so of several messages
    until(drafters, lambda: drafters.counts()["model_opened"] == 2)
    drafters.exchange()
    (again,) = other.hear()
    assert again.tokens.tolist() == [*CONTEXT.tolist(), 1] and again.name != wish.name
    assert drafters.counts()["model_opened"] == 2
    drafters.meet([])
    drafters.exchange()
    drafters.made("c", [2])
    assert not drafters.waits("c")


def test_a_sample_that_its_drafter_refuses_is_given_back(line):
    """It was opened again after every step, with its whole context."""
    drafters, other, chunk = line
    drafters.meet([other.address])
    drafters.exchange()
    drafters.open(chunk, None)
    (wish,) = other.hear()
    other.say(Unknown(wish.name))
    until(drafters, lambda: drafters.counts()["model_opened"] == 2)
    drafters.exchange()
    (again,) = other.hear()
    other.say(Guess(again.name, 10, [1, 2], 0, 0), Unknown(again.name))
    until(drafters, lambda: drafters.counts()["model_opened"] == 3)
    drafters.exchange()
    (third,) = other.hear()
    other.say(Unknown(third.name))
    until(drafters, lambda: drafters.counts().get("model_given_back") or drafters.counts()["model_opened"] == 4)
    drafters.made("c", [1])
    drafters.exchange()
    assert other.hear() == [Stop(third.name)] and not drafters.waits("c")
    counts = drafters.counts()
    assert (counts["model_opened"], counts["model_lines"], counts["model_given_back"]) == (3, 0, 1)


def test_noise_is_the_samples_own_unless_measured_without():
    context = zmq.Context()
    keys = []
    for shared in (True, False):
        other = Drafter(context)
        drafters = Drafters(DrafterConfig(model="m", shared_noise=shared))
        plan = DraftPlan(GroupRef("b/p", "key"), 0, 0, 60, (0, 0), FixedBudget(tokens=4))
        drafters.meet([other.address])
        drafters.exchange()
        drafters.open(ChunkRequest("c", 7, CONTEXT, 8, 30, SamplingParams(), 0, draft=plan), None)
        drafters.exchange()
        keys.append(other.hear()[0].key)
        drafters.stop()
        other.socket.close()
    context.term()
    assert keys[0] == 7 != keys[1]


def test_for_a_sample_without_a_window_nobody_drafts_whatever_drafters_come_and_go(line):
    drafters, other, chunk = line
    drafters.meet([other.address])
    drafters.exchange()
    drafters.open(chunk, DraftMode(0, True))
    drafters.meet([])
    drafters.exchange()
    drafters.meet([other.address])
    drafters.exchange()
    drafters.made("c", [1])
    drafters.exchange()
    assert not drafters.waits("c") and not len(drafters.proposal("c").tokens)
    assert drafters.close("c") == (0, 0) and "model_opened" not in drafters.counts()


def test_a_sample_that_takes_turns_waits_for_a_guess_but_not_for_ever():
    clock = Clock()
    with line_of(clock) as (drafters, other, chunk):
        drafters.open(chunk, None)
        assert not drafters.waits("c"), "it runs ahead"
        drafters.close("c")
        drafters.meet([other.address])
        drafters.exchange()
        drafters.open(chunk, DraftMode(2, True))
        (wish,) = other.hear()
        drafters.made("c", [1])
        clock.now_s += 0.4
        assert drafters.waits("c")
        other.say(Guess(wish.name, 11, [2, 3], 0, 0))
        until(drafters, lambda: not drafters.waits("c"))
        assert drafters.proposal("c").tokens.tolist() == [2, 3]
        drafters.made("c", [2, 3, 4])
        clock.now_s += 0.7
        assert drafters.waits("c"), "the last guess took 0.4 s, so it is patient for 0.8"
        clock.now_s += 0.2
        assert not drafters.waits("c")
        drafters.made("c", [5])
        assert not drafters.waits("c"), "silence is waited for once"
        assert drafters.counts()["model_late"] == 1
