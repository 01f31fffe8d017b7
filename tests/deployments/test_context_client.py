"""An engine's side of the group context, over scripted shards: the engine never waits, and no token is lost or doubled.

Ray has a stand-in: a call is answered at once, or raises, or waits until a test lets it go.
"""

import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from waiting import until

from tailrace.deployments.context.context_client import ContextClient
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.live_groups import LiveGroups, Packet
from tailrace.deployments.context.prompt_files import shard_of
from tailrace.deployments.context.shard_exchange import ShardExchange, _joined, _within
from tailrace.deployments.context.shard_handles import NoShard
from tailrace.deployments.messages.context import GroupRef, PastAnswer, Piece
from tailrace.kvpool.counts import Counts

QUICK = ContextConfig(flush_s=0.002, linger_s=0.004, retry_s=0.002, flush_tokens=1, deadline_s=5.0)
GROUP, OTHER = GroupRef("b/p", "key"), GroupRef("b/q", "another key")


class RayActorError(Exception):
    """In the place of Ray's."""


class Ref:
    """A call under way: `done` once it may be read."""

    def __init__(self, answer, is_done: bool = True):
        self.answer, self.done = answer, threading.Event()
        if is_done:
            self.done.set()


def get(ref: Ref, timeout: float | None = None):
    if not ref.done.wait(timeout):
        raise TimeoutError("late")
    if isinstance(ref.answer, Exception):
        raise ref.answer
    return ref.answer


@pytest.fixture(autouse=True)
def _ray(monkeypatch):
    ray, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    ray.get, ray.exceptions, exceptions.RayActorError = get, exceptions, RayActorError
    ray.wait = lambda refs, timeout: (refs, []) if refs[0].done.is_set() else ([], refs)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)


class Shard:
    """`fails`: answers in the place of its own, each for one call. `history`: by group."""

    def __init__(self):
        self.live, self.history = LiveGroups(1e6, 2**30, 1), {}
        self.exchanged, self.asked, self.fails, self.past_waits = [], [], [], False
        self.refs: list[Ref] = []
        self.exchange = SimpleNamespace(options=self._options)
        self.past = SimpleNamespace(remote=self._past)

    def _options(self, max_task_retries: int):
        assert max_task_retries == 0, "an exchange that is made twice loses news"
        return SimpleNamespace(remote=self._exchange)

    def _exchange(self, writer: str, packet: Packet, wants) -> Ref:
        pieces = [(p.group, p.sample_index, p.start, p.tokens.tolist()) for p in packet.pieces()]
        self.exchanged.append((writer, pieces, [want.group for want in wants]))
        if fails := self.fails:  # a test may give others meanwhile
            return Ref(fails.pop(0))
        news, cursors = self.live.fetch(writer, wants, 0.0)
        self.live.append(writer, packet, 0.0)
        return Ref((news, cursors))

    def _past(self, groups) -> Ref:
        self.asked.append(list(groups))
        self.refs.append(Ref([self.history.get(group, []) for group in groups], not self.past_waits))
        return self.refs[-1]

    def write(self, group: GroupRef, sample_index: int, start: int, tokens: list[int], writer: str = "mate") -> None:
        self.live.append(writer, Packet.of([Piece(group, sample_index, start, np.array(tokens, np.int32))]), 0.0)


class Shards:
    """Handles. `shards`: by index."""

    def __init__(self, *shards: Shard):
        self.shards, self.lost = dict(enumerate(shards)), []

    def at(self, index: int) -> Shard:
        if index not in self.shards:
            raise NoShard(str(index))
        return self.shards[index]

    def lose(self, index: int) -> None:
        self.lost.append(index)


@pytest.fixture
def made():
    """Makes clients that end with the test."""
    clients = []

    def make(*shards: Shard, config: ContextConfig = QUICK, **knobs) -> ContextClient:
        clients.append(ContextClient(Shards(*shards), config.model_copy(update=knobs), "me"))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


class Reader:
    """What a client has given: tokens by group, sample and position, each once."""

    def __init__(self, client: ContextClient):
        self.client, self.tokens, self.history = client, {}, []

    def look(self) -> dict:
        for fetched in self.client.take():
            self.history += fetched.history
            for piece in fetched.pieces:
                for position, token in enumerate(piece.tokens.tolist(), piece.start):
                    key = piece.group, piece.sample_index, position
                    assert key not in self.tokens, "twice"
                    self.tokens[key] = token
        return self.tokens

    def read(self, count: int) -> list[int]:
        """In the order of their positions, once there are so many."""
        until(lambda: len(self.look()) >= count)
        assert len(self.tokens) == count
        return [token for _, token in sorted(self.tokens.items())]


def group_of(index: int) -> GroupRef:
    """A group of this shard of two."""
    groups = (GroupRef(f"b/{number}", f"key {number}") for number in range(99))
    return next(group for group in groups if shard_of(group.prompt_key, 2) == index)


def sent(shard: Shard) -> list:
    return [piece for _, pieces, _ in shard.exchanged for piece in pieces]


def answer(epoch: int, tokens: list[int]) -> PastAnswer:
    array = np.array(tokens, np.int32)
    array.flags.writeable = False  # as Ray's
    return PastAnswer("key", epoch, 1, None, array)


def test_tokens_go_out_once_and_those_of_mates_come_in_once(made):
    shard = Shard()
    client = made(shard)
    shard.write(GROUP, 1, 0, [5, 6])
    client.hold(GROUP)
    client.append(GROUP, 0, 0, [1, 2])
    client.append(GROUP, 0, 2, np.array([3], np.int32))
    reader = Reader(client)
    assert reader.read(2) == [5, 6]
    until(lambda: sent(shard))
    shard.write(GROUP, 1, 2, [7])
    assert reader.read(3) == [5, 6, 7]
    counts = until(lambda: (found := client.counts()).get("sent_tokens") == 3 and found)
    assert sent(shard) in ([(GROUP, 0, 0, [1, 2, 3])], [(GROUP, 0, 0, [1, 2]), (GROUP, 0, 2, [3])])
    assert counts["fetched_tokens"] == 3 and list(counts) == sorted(counts)
    assert {writer for writer, _, _ in shard.exchanged} == {"me"}
    assert not [name for name in counts if "failed" in name or "dropped" in name]


def test_few_tokens_wait_and_enough_go_at_once(made):
    shard = Shard()
    client = made(shard, linger_s=3600.0, flush_tokens=3)
    client.hold(GROUP)
    until(lambda: len(shard.exchanged) == 1)  # a group that is held asks at once
    client.append(GROUP, 0, 0, [1, 2])
    time.sleep(0.02)
    assert len(shard.exchanged) == 1
    client.append(GROUP, 0, 2, [3])
    until(lambda: sent(shard))
    assert sent(shard) == [(GROUP, 0, 0, [1, 2, 3])] and len(shard.exchanged) == 2


def test_an_engine_without_groups_and_tokens_says_nothing(made):
    shard = Shard()
    client = made(shard)
    client.hold(GROUP)
    until(lambda: shard.exchanged)
    client.rest(GROUP)
    until(lambda: is_quiet(shard))
    assert Reader(client).look() == {}


def is_quiet(shard: Shard) -> bool:
    before = len(shard.exchanged)
    time.sleep(0.02)
    return len(shard.exchanged) == before


def test_a_group_at_rest_is_read_on_from_where_it_was_and_a_released_one_from_its_start(made):
    shard = Shard()
    client = made(shard)
    shard.write(GROUP, 1, 0, [5, 6])
    client.hold(GROUP)
    reader = Reader(client)
    assert reader.read(2) == [5, 6]
    client.rest(GROUP)
    until(lambda: GROUP in client._exchanges[0]._resting)  # its thread has heard of it
    shard.write(GROUP, 1, 2, [7])
    until(lambda: is_quiet(shard))
    assert len(reader.look()) == 2, "nothing is asked for it"
    client.hold(GROUP)
    assert reader.read(3) == [5, 6, 7] and len(shard.asked) == 1, "its history comes once"
    client.release(GROUP)
    client.hold(GROUP)
    again = Reader(client)
    assert again.read(3) == [5, 6, 7] and len(shard.asked) == 2


def test_news_of_a_released_group_are_not_given_and_its_last_tokens_are_sent(made):
    shard = Shard()
    client = made(shard, linger_s=3600.0, flush_tokens=2)
    client.hold(GROUP)
    client.hold(OTHER)
    shard.write(GROUP, 1, 0, [5])
    shard.write(OTHER, 1, 0, [6])
    until(lambda: client.counts().get("fetched_tokens", 0) >= 2 or client._exchanges[0]._wake.set())
    client.append(GROUP, 0, 0, [1, 2])
    client.release(GROUP)
    assert [fetched.group for fetched in client.take()] == [OTHER]
    until(lambda: sent(shard))
    assert sent(shard) == [(GROUP, 0, 0, [1, 2])]


def test_history_comes_once_and_may_be_written_to(made):
    shard = Shard()
    shard.history = {GROUP: [answer(2, [1, 2]), answer(1, [3])]}
    client = made(shard)
    client.hold(GROUP)
    client.hold(OTHER)
    reader = Reader(client)
    until(lambda: reader.look() or reader.history)
    assert [(one.epoch, one.tokens.tolist()) for one in reader.history] == [(2, [1, 2]), (1, [3])]
    reader.history[0].tokens[0] = 9
    until(lambda: sum(map(len, shard.asked)) == 2)
    assert until(lambda: client.counts().get("history_tokens")) == 3
    until(lambda: len(shard.exchanged) > 5)
    reader.look()
    assert len(reader.history) == 2 and sum(map(len, shard.asked)) == 2


def test_history_that_is_slow_holds_up_no_tokens_and_no_second_question(made):
    shard = Shard()
    shard.past_waits, shard.history = True, {GROUP: [answer(1, [3])]}
    client = made(shard)
    client.hold(GROUP)
    until(lambda: shard.asked)
    client.hold(OTHER)
    shard.write(GROUP, 1, 0, [5])
    reader = Reader(client)
    assert reader.read(1) == [5] and not reader.history and shard.asked == [[GROUP]]
    shard.past_waits = False
    shard.refs[0].done.set()
    until(lambda: reader.look() and reader.history)
    until(lambda: shard.asked == [[GROUP], [OTHER]])


@pytest.mark.parametrize("error", [RayActorError("gone"), TimeoutError("late"), ValueError("odd")])
def test_tokens_that_may_not_have_arrived_are_sent_again_and_the_failure_is_counted(made, error):
    shard = Shard()
    client = made(shard)
    shard.fails = [error]
    client.hold(GROUP)
    client.append(GROUP, 0, 0, [1, 2])
    until(lambda: len(shard.exchanged) > 2)
    until(lambda: client.counts().get("sent_tokens") == 2)
    assert client.counts()[f"exchange_failed.{type(error).__name__}"] == 1
    assert len(sent(shard)) <= 3 and sent(shard)[-1][3][-1] == 2
    shard.write(GROUP, 1, 0, [5])
    assert Reader(client).read(1) == [5]


def test_history_that_failed_is_asked_again_and_a_defect_is_not(made):
    shard = Shard()
    shard.past_waits, shard.history = True, {GROUP: [answer(1, [3])]}
    client = made(shard)
    client.hold(GROUP)
    until(lambda: shard.asked)
    shard.refs[0].answer, shard.past_waits = RayActorError("it starts again"), False
    shard.refs[0].done.set()
    reader = Reader(client)
    until(lambda: reader.look() or reader.history)
    assert shard.asked == [[GROUP], [GROUP]] and client.counts()["ask_past_failed.RayActorError"] == 1


def test_the_oldest_tokens_go_where_a_shard_is_away_for_long(made):
    shard = Shard()
    client = made(shard, unsent_tokens=4)
    shard.fails = [TimeoutError("late")] * 100_000
    client.hold(GROUP)
    for start in range(0, 12, 3):
        client.append(GROUP, start, 0, [start] * 3)
    until(lambda: client.counts().get("dropped_tokens", 0) == 9)
    shard.fails = []
    until(lambda: client.counts().get("sent_tokens"))
    assert client.counts()["dropped_tokens"] == 9 and sent(shard)[-1][1] == 9


def test_each_group_is_exchanged_with_its_own_shard(made):
    shards = Shard(), Shard()
    client = made(*shards, shards=2)
    for index in range(2):
        client.hold(group_of(index))
        client.append(group_of(index), 0, 0, [index])
    until(lambda: all(map(sent, shards)))
    assert [sent(shard) for shard in shards] == [[(group_of(index), 0, 0, [index])] for index in range(2)]
    assert [shard.asked for shard in shards] == [[[group_of(index)]] for index in range(2)]


@pytest.mark.parametrize("error", [RayActorError("it starts again"), NoShard("0")])
def test_the_handle_of_a_shard_that_is_gone_is_dropped_and_that_of_another_error_is_kept(made, error):
    shard = Shard()
    client = made(shard)
    shard.fails = [ValueError("odd"), error]
    client.hold(GROUP)
    until(lambda: client.counts().get(f"exchange_failed.{type(error).__name__}"))
    assert client._exchanges[0]._shards.lost == [0]
    assert client.counts()["exchange_failed.ValueError"] == 1


def test_an_answer_for_another_number_of_groups_is_counted_and_not_used(made):
    shard = Shard()
    shard.past_waits = True
    client = made(shard)
    client.hold(GROUP)
    until(lambda: shard.asked)
    shard.refs[0].answer = []
    shard.refs[0].done.set()
    until(lambda: client.counts().get("ask_past_failed.ValueError"))


def test_an_engine_looks_seldom(made, monkeypatch):
    looks, listen = [], ShardExchange._listen
    monkeypatch.setattr(ShardExchange, "_listen", lambda self: looks.append(1) or listen(self))
    began_s, client = time.monotonic(), made(Shard(), flush_s=0.01)
    client.hold(GROUP)
    until(lambda: len(looks) > 5)
    most = len(looks)
    assert most < 5 + (time.monotonic() - began_s) / 0.01, "it would look thousands of times without a pause"


def test_a_closed_client_ends_its_threads(made):
    shard = Shard()
    client = made(shard)
    client.hold(GROUP)
    until(lambda: shard.exchanged)
    client.close()
    before = len(shard.exchanged)
    client.append(GROUP, 0, 0, [1])
    time.sleep(0.02)
    assert len(shard.exchanged) == before
    assert not [one for one in threading.enumerate() if one is client._exchanges[0]._thread]


def test_pieces_that_follow_each_other_are_one_and_a_gap_stays():
    pieces = [
        Piece(GROUP, 0, 0, [1, 2]),
        Piece(OTHER, 0, 2, [9]),
        Piece(GROUP, 0, 2, np.array([3])),
        Piece(GROUP, 0, 7, [4]),
    ]
    joined = [(p.group, p.sample_index, p.start, p.tokens.tolist(), p.tokens.dtype.str) for p in _joined(pieces)]
    assert joined == [
        (GROUP, 0, 0, [1, 2, 3], "<i4"), (GROUP, 0, 7, [4], "<i4"), (OTHER, 0, 2, [9], "<i4"),
    ]  # fmt: skip


def test_the_newest_pieces_are_kept_within_the_bound():
    pieces = [Piece(GROUP, number, 0, np.zeros(3, np.int32)) for number in range(4)]
    for most, kept, dropped in ((12, 4, 0), (11, 3, 3), (9, 3, 3), (2, 0, 12)):
        counts = Counts()
        assert _within(pieces, most, counts) == pieces[4 - kept :]
        assert counts.take().get("dropped_tokens", 0) == dropped
