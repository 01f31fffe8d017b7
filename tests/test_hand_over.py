"""A shard that gives files away, and its view of the set: what fails comes back, and nothing is done for another."""

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from virtual_story import play_in

from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.group_log import NOWHERE
from tailrace.deployments.context.hand_over import ACKNOWLEDGE_S, HandOver
from tailrace.deployments.context.live_groups import LiveGroups, Packet, Want
from tailrace.deployments.context.membership import LOOK_S, Membership, NoShard
from tailrace.deployments.context.shard_set import ShardSet, file_of
from tailrace.deployments.messages.context import GroupRef, Piece
from tailrace.lab.fuzz.virtual_time import VirtualLoop

GROUP, OTHER = GroupRef("b/p", "key"), GroupRef("b/q", "another key")
FILE = file_of(GROUP.prompt_key)
CONFIG = ContextConfig(shards=1, max_shards=4)


class Peers:
    """Other shards. `answer`: of each call, given its index, method and arguments; may raise. `away`: indexes."""

    def __init__(self, answer: Callable):
        self.answer, self.calls, self.lost, self.started, self.ended, self.away = answer, [], [], [], [], set()

    def at(self, index: int):
        if index in self.away:
            raise NoShard(str(index))
        return _Shard(self, index)

    def start(self, index: int) -> None:
        self.started.append(index)

    def end(self, index: int) -> None:
        self.ended.append(index)

    def lose(self, index: int) -> None:
        self.lost.append(index)


class _Shard:
    def __init__(self, peers: Peers, index: int):
        self._peers, self._index = peers, index

    def __getattr__(self, method: str):
        async def call(*arguments):
            self._peers.calls.append((self._index, method, *arguments))
            answer = self._peers.answer(self._index, method, *arguments)
            return await answer if asyncio.iscoroutine(answer) else answer

        return SimpleNamespace(remote=call)


class Archive:
    """`packed`: contents of files in memory."""

    def __init__(self):
        self.packed, self.adopted = {FILE: b"history"}, []

    def release(self, file: int) -> bytes | None:
        return self.packed.pop(file, None)

    def adopt(self, file: int, packed: bytes | None) -> None:
        self.adopted.append((file, packed))
        if packed is not None:
            self.packed[file] = packed


class Giver:
    """A shard whose file FILE has owner 1 now."""

    def __init__(self, answer: Callable):
        self.live, self.archive, self.counts, self.peers = (
            LiveGroups(1e6, 2**30, 5),
            Archive(),
            Counter(),
            Peers(answer),
        )
        self.owner = {FILE: 1}
        for group, length in ((GROUP, 8), (OTHER, 3)):
            self.live.append("a", Packet.of([Piece(group, 0, 0, np.arange(length, dtype=np.int32))]), 0.0)
        self.giving = HandOver(
            live=self.live,
            archive=self.archive,
            on_disk=self._on_disk,
            shards=lambda: ShardSet(3, 2),
            owner=self.owner.get,
            peers=self.peers,
            counts=self.counts,
            retry_s=1.0,
        )

    async def _on_disk(self, work: Callable):
        return work()

    async def done(self) -> None:
        while self.giving.files:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)


def play(story) -> None:
    loop = VirtualLoop()
    play_in(loop, story)


def test_a_file_is_given_once_with_its_groups_first_and_others_stay():
    async def story():
        giver = Giver(lambda *_: None)
        giver.giving.add([FILE])
        await giver.done()
        (groups, history) = giver.peers.calls
        assert groups[:4] == (1, "take_groups", ShardSet(3, 2), FILE)
        assert [handed.group for handed in groups[4]] == [GROUP] and groups[4][0].era
        assert history == (1, "take_history", ShardSet(3, 2), FILE, b"history")
        assert giver.live.find("q") and giver.live.find("p") is None
        nbytes = groups[4][0].nbytes() + len(b"history")
        assert giver.counts == {"handed_groups": 1, "handed_bytes": nbytes, "handed_files": 1, "hand_over_ms": 0}
        assert not giver.peers.lost and not giver.archive.adopted
        giver.giving.add([])
        await asyncio.sleep(10.0)
        assert len(giver.peers.calls) == 2

    play(story)


def test_a_file_that_is_this_shard_s_again_stays():
    async def story():
        giver = Giver(lambda *_: None)
        giver.owner.clear()
        giver.giving.add([FILE])
        await giver.done()
        assert giver.peers.calls == [] and giver.live.find("p") and giver.archive.packed == {FILE: b"history"}

    play(story)


@pytest.mark.parametrize("error", [ConnectionError("away"), asyncio.CancelledError()])
@pytest.mark.parametrize("method", ["take_groups", "take_history"])
def test_contents_that_were_not_taken_come_back_and_are_given_again_after_a_pause(method, error):
    """Serve raises CancelledError for a callee that was cancelled, too."""

    async def story():
        fails = [error]

        def answer(index, called, *_):
            if called == method and fails:
                raise fails.pop()

        giver = Giver(answer)
        giver.giving.add([FILE])
        await asyncio.sleep(0.5)
        assert giver.archive.packed == {FILE: b"history"}
        assert (giver.live.find("p") is not None) is (method == "take_groups")
        assert giver.counts[f"hand_over_failed.{type(error).__name__}"] == 1 and giver.peers.lost == [1]
        assert not giver.counts["handed_files"] and "hand_over_ms" not in giver.counts
        calls = len(giver.peers.calls)
        await asyncio.sleep(0.4)
        assert len(giver.peers.calls) == calls, "not before retry_s"
        await giver.done()
        assert giver.live.find("p") is None and giver.archive.packed == {}
        assert giver.counts["handed_files"] == 1 and giver.counts["hand_over_ms"] >= 1000

    play(story)


def test_one_who_takes_too_long_has_not_taken_it():
    async def story():
        slow = [ACKNOWLEDGE_S + 5.0]

        def answer(*_):
            return asyncio.sleep(slow.pop() if slow else 0.0)

        giver = Giver(answer)
        giver.giving.add([FILE])
        await asyncio.sleep(ACKNOWLEDGE_S - 1.0)
        assert giver.live.find("p") is None, "it is on its way"
        await asyncio.sleep(1.5)
        assert giver.live.find("p") is not None and giver.counts["hand_over_failed.TimeoutError"] == 1
        await giver.done()
        assert giver.live.find("p") is None

    play(story)


def test_a_group_that_came_back_is_read_from_its_start():
    """Its tokens may have another order by then, in which an old cursor would miss some."""

    async def story():
        fails = [ConnectionError("away")]

        def answer(*_):
            if fails:
                raise fails.pop()

        giver = Giver(answer)
        _, (cursor,) = giver.live.fetch("reader", [Want(GROUP, NOWHERE)], 0.0)
        before = giver.live.nbytes
        giver.giving.add([FILE])
        await asyncio.sleep(0.5)
        assert giver.live.nbytes == before
        news, (after,) = giver.live.fetch("reader", [Want(GROUP, cursor)], 0.0)
        assert len(news.tokens) == 8 and after.era != cursor.era

    play(story)


def test_a_shard_that_ends_gives_nothing_more():
    async def story():
        giver = Giver(lambda *_: asyncio.sleep(100.0))
        giver.giving.add([FILE])
        await asyncio.sleep(1.0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks) and len(giver.peers.calls) == 1
        assert not [name for name in giver.counts if name.startswith("hand_over")]
        assert giver.live.find("p") is not None, "it is still ours"

    play(story)


def test_a_file_that_is_added_under_way_is_given_again():
    """By then its owner may have another answer."""

    async def story():
        giver = Giver(lambda *_: asyncio.sleep(1.0))
        giver.giving.add([FILE])
        await asyncio.sleep(0.5)
        giver.giving.add([FILE])
        await giver.done()
        assert [call[1] for call in giver.peers.calls] == ["take_groups", "take_history"] * 2
        assert len(asyncio.all_tasks()) == 1

    play(story)


def test_bytes_of_groups_that_come_twice_are_counted_once():
    here, there = LiveGroups(1e6, 2**30, 1), LiveGroups(1e6, 2**30, 100)
    here.append("a", Packet.of([Piece(GROUP, 0, 0, np.arange(8, dtype=np.int32))]), 0.0)
    handed = here.take_out(FILE)
    there.put_in(handed, 0.0)
    once = there.nbytes
    there.put_in(handed, 0.0)
    there.put_in(handed, 0.0)
    assert once > 0 and there.nbytes == once == there.find("p")[1].nbytes
    there.forget(GROUP)
    assert there.nbytes == 0


# ---- the set of shards ----------------------------------------------------------------------------------


class Member:
    def __init__(self, index: int, answer: Callable, config: ContextConfig = CONFIG):
        self.counts, self.followed, self.peers = Counter(), [], Peers(answer)
        self.one = Membership(config, index, self.peers, self.counts, self.followed.append)


def test_a_newer_set_is_followed_once_and_an_older_one_never():
    async def story():
        member = Member(1, lambda *_: None)
        assert member.one.learn(ShardSet(2, 3)) == ShardSet(2, 3)
        assert member.one.learn(ShardSet(2, 3)) == ShardSet(2, 3)
        assert member.one.learn(ShardSet(1, 4)) == ShardSet(2, 3)
        assert member.followed == [ShardSet(2, 3)]

    play(story)


def test_the_first_shard_starts_others_before_the_set_has_them():
    async def story():
        seen = []

        def learn(index, method, shards):
            seen.append((index, shards))
            return shards

        member = Member(0, learn)
        assert await member.one.resize(3, ShardSet(0, 0)) == ShardSet(1, 3)
        assert member.peers.started == [1, 2] and member.followed == [ShardSet(1, 3)]
        assert seen == [(1, ShardSet(0, 1)), (2, ShardSet(0, 1)), (1, ShardSet(1, 3)), (2, ShardSet(1, 3))]
        seen.clear()
        assert await member.one.resize(3, ShardSet(1, 3)) == ShardSet(1, 3), "as it is"
        assert [shards for _, shards in seen] == [ShardSet(1, 3)] * 2
        seen.clear()
        assert await member.one.resize(1, ShardSet(0, 0)) == ShardSet(2, 1)
        assert sorted(seen) == [(1, ShardSet(2, 1)), (2, ShardSet(2, 1))], "those that go hear of it"
        assert await member.one.resize(0, ShardSet(0, 0)) == ShardSet(2, 1), "the configured minimum"
        assert await member.one.resize(1, ShardSet(7, 2)) == ShardSet(8, 1), "the caller's set was newer"

    play(story)


def test_a_shard_that_does_not_start_leaves_the_set_as_it_was():
    async def story():
        def learn(index, method, shards):
            if index == 2:
                raise ConnectionError("no room")
            return shards

        member = Member(0, learn)
        assert await member.one.resize(3, ShardSet(0, 0)) == ShardSet(0, 1)
        assert member.followed == [] and member.peers.lost == [2]
        assert member.counts == {"learn_failed.ConnectionError": 1}

    play(story)


def test_a_shard_that_knows_a_newer_set_teaches_the_first_one():
    async def story():
        member = Member(0, lambda index, method, shards: max(shards, ShardSet(9, 2)))
        assert await member.one.resize(2, ShardSet(0, 0)) == ShardSet(9, 2)
        assert member.followed == [ShardSet(9, 2)]

    play(story)


def test_a_shard_looks_at_the_first_one_and_follows_its_set():
    async def story():
        member = Member(1, lambda index, method, *_: ShardSet(4, 3))
        looking = asyncio.ensure_future(member.one.look(lambda: True))
        await asyncio.sleep(LOOK_S - 0.1)
        assert member.peers.calls == []
        await asyncio.sleep(0.2)
        assert member.peers.calls == [(0, "learn", ShardSet(0, 1))] and member.one.set == ShardSet(4, 3)
        member.peers.away.add(0)
        await looking
        assert [call[1] for call in member.peers.calls] == ["learn"], "it is wanted: it never asks to end"

    play(story)


def test_a_shard_asks_to_end_at_its_second_look_without_contents_and_not_while_it_has_some():
    async def story():
        empty = [False, True, False, True, True, True]
        member = Member(1, lambda index, method, *_: ShardSet(4, 1) if method == "learn" else None)
        looking = asyncio.ensure_future(member.one.look(lambda: empty.pop(0)))
        await asyncio.sleep(5.5 * LOOK_S)
        retired = [number for number, call in enumerate(member.peers.calls) if call[1] == "retire"]
        assert retired == [5] and member.peers.calls[5] == (0, "retire", 1), "after five looks"
        looking.cancel()

    play(story)


@pytest.mark.parametrize("error", [ConnectionError("away"), asyncio.CancelledError()])
def test_a_first_shard_that_does_not_answer_is_asked_again(error):
    async def story():
        fails = [error]

        def answer(*_):
            if fails:
                raise fails.pop()
            return ShardSet(4, 3)

        member = Member(1, answer)
        looking = asyncio.ensure_future(member.one.look(lambda: True))
        await asyncio.sleep(1.5 * LOOK_S)
        assert member.one.set == ShardSet(0, 1) and member.peers.lost == [0] and not looking.done()
        assert member.counts == {f"learn_failed.{type(error).__name__}": 1}
        await asyncio.sleep(LOOK_S)
        assert member.one.set == ShardSet(4, 3)
        looking.cancel()
        await asyncio.wait({looking})
        assert looking.cancelled()

    play(story)


def test_a_shard_that_is_cancelled_in_a_call_ends():
    async def story():
        member = Member(1, lambda *_: asyncio.sleep(100.0))
        looking = asyncio.ensure_future(member.one.look(lambda: True))
        await asyncio.sleep(LOOK_S + 0.5)
        looking.cancel()
        await asyncio.wait({looking}, timeout=1.0)
        assert looking.cancelled() and not member.counts

    play(story)


def test_a_shard_that_is_wanted_is_not_ended_nor_any_while_the_number_changes():
    async def story():
        member = Member(0, lambda index, method, *_: asyncio.sleep(1.0, ShardSet(0, 1)))
        member.one.learn(ShardSet(1, 2))
        member.one.retire(1)
        assert member.peers.ended == []
        resizing = asyncio.ensure_future(member.one.resize(3, ShardSet(0, 0)))
        await asyncio.sleep(0.5)
        member.one.retire(2)
        assert member.peers.ended == []
        await resizing
        member.one.retire(3)
        assert member.peers.ended == [3] and member.counts["ended_shards"] == 1

    play(story)


def test_the_number_of_shards_has_bounds_that_may_be_equal():
    assert ContextConfig(shards=3, max_shards=3).max_shards == 3
    with pytest.raises(ValueError, match="max_shards is 2, less than shards, 3"):
        ContextConfig(shards=3, max_shards=2)
