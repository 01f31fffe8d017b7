"""Laws of a set of shards that changes: few files move, nothing is lost, and each reader reads on."""

import asyncio
import math
from contextlib import contextmanager
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.group_log import NOWHERE, Cursor
from tailrace.deployments.context.history import Answer, prompt_key
from tailrace.deployments.context.live_groups import LiveGroups, Packet, Want
from tailrace.deployments.context.membership import NoShard
from tailrace.deployments.context.shard import ContextShard
from tailrace.deployments.context.shard_count import ShardCount, shards_wanted
from tailrace.deployments.context.shard_set import EVERY, FILES, Moved, ShardSet, file_of, shard_of, shards_files
from tailrace.deployments.messages.context import GroupRef, Piece
from tailrace.lab.fuzz.virtual_time import VirtualLoop

GROUPS = [GroupRef(f"batch/p{number}", prompt_key(f"prompt {number}")) for number in range(12)]
PLENTY = 2**30


@given(st.integers(1, FILES - 1))
def test_one_more_shard_takes_its_share_and_no_other_file_moves(shards):
    before = [shards_files(index, shards) for index in range(shards)]
    after = [shards_files(index, shards + 1) for index in range(shards + 1)]
    assert sorted(file for files in after for file in files) == list(EVERY)
    assert all(new <= old for new, old in zip(after, before, strict=False)), "the others only give"
    assert {len(files) for files in after} <= {FILES // (shards + 1), math.ceil(FILES / (shards + 1))}


@given(st.text(), st.integers(1, FILES))
def test_a_prompts_shard_is_that_of_its_file(key, shards):
    assert file_of(key) in shards_files(shard_of(key, shards), shards)


@pytest.mark.parametrize(("busy", "shards"), [(0, 1), (1, 1), (64, 1), (65, 2), (512, 8), (5000, 16)])
def test_the_number_of_shards_follows_busy_replicas(busy, shards):
    assert shards_wanted(busy, ContextConfig()) == shards
    assert shards_wanted(busy, ContextConfig(shards=3, max_shards=5)) == min(max(shards, 3), 5)


def test_the_number_grows_at_once_and_falls_after_a_while():
    count = ShardCount(ContextConfig(replicas_per_shard=1, shrink_after_s=30.0))
    loads = [(0, 1), (5, 4), (10, 2), (20, 3), (36, 1), (49, 1), (51, 1), (66, 1), (67, 6)]
    assert [count.next(busy, now_s) for now_s, busy in loads] == [1, 4, 4, 4, 3, 3, 1, 1, 6]


def test_a_minimum_above_the_maximum_is_refused():
    with pytest.raises(ValueError, match="max_shards is 2, less than shards, 3"):
        ContextConfig(shards=3, max_shards=2)


def test_a_reader_reads_on_in_the_shard_that_took_a_group_over():
    """No token twice, none lost, and no writer gets its own back."""
    group, file = GROUPS[0], file_of(GROUPS[0].prompt_key)
    here, there = LiveGroups(100.0, PLENTY, 1), LiveGroups(100.0, PLENTY, 1000)
    there.append("someone else", Packet.of([Piece(GROUPS[1], 0, 0, np.arange(3, dtype=np.int32))]), 0.0)
    here.append("a", Packet.of([Piece(group, 0, 0, np.arange(8, dtype=np.int32))]), 0.0)
    here.append("b", Packet.of([Piece(group, 1, 2, np.arange(4, dtype=np.int32))]), 0.0)
    here.finish(group, {1: 6}, 0.0)
    _, (cursor,) = here.fetch("a", [Want(group, NOWHERE)], 0.0)
    here.append("b", Packet.of([Piece(group, 1, 6, np.full(2, 7, np.int32))]), 0.0)
    there.put_in(here.take_out(file), 0.0)
    assert (len(here), here.nbytes) == (0, 0) and there.find("p0")[1].finished == {1: 6}
    news, (after,) = there.fetch("a", [Want(group, cursor)], 0.0)
    assert [(p.sample_index, p.start, p.tokens.tolist()) for p in news.pieces()] == [(1, 6, [7, 7])]
    whole, _ = there.fetch("c", [Want(group, NOWHERE)], 0.0)
    assert len(whole.tokens) == 14 and after.era == cursor.era
    there.append("a", Packet.of([Piece(group, 0, 8, np.zeros(1, np.int32))]), 0.0)
    assert len(there.fetch("a", [Want(group, after)], 0.0)[0].tokens) == 0, "it is still the writer that it was"


# ---- a whole set, on a virtual clock -------------------------------------------------------------------


class Method:
    """`handle.method`: a call arrives after a while, or fails before or after it was done."""

    def __init__(self, cluster: "Cluster", index: int, name: str):
        self._cluster, self._index, self._name = cluster, index, name

    def remote(self, *arguments) -> asyncio.Future:
        return asyncio.ensure_future(self._call(*arguments))

    async def _call(self, *arguments):
        rng = self._cluster.rng
        await asyncio.sleep(rng.random() * 0.1)
        if rng.random() < self._cluster.failing / 2 or self._index not in self._cluster.shards:
            raise ConnectionError("not sent")
        answer = await getattr(self._cluster.shards[self._index], self._name)(*arguments)
        await asyncio.sleep(rng.random() * 0.1)
        if rng.random() < self._cluster.failing / 2:
            raise ConnectionError("no answer")
        return answer


class Handle:
    def __init__(self, cluster: "Cluster", index: int):
        self._cluster, self._index = cluster, index

    def __getattr__(self, name: str) -> Method:
        return Method(self._cluster, self._index, name)


class Cluster:
    """Shards in one process, and their `Peers`. `failing`: share of calls that do."""

    def __init__(self, config: ContextConfig, seed: int):
        self.config, self.rng, self.failing = config, Random(seed), 0.0
        self.shards: dict[int, ContextShard] = {}
        self.ended: list[ContextShard] = []
        self.looks: dict[int, asyncio.Task] = {}
        self.start(0)

    def at(self, index: int) -> Handle:
        if index not in self.shards:
            raise NoShard(str(index))
        return Handle(self, index)

    def start(self, index: int) -> None:
        if index not in self.shards:
            self.shards[index] = ContextShard(self.config, index, self)
            if index:
                self.looks[index] = asyncio.get_running_loop().create_task(self.shards[index].look())

    def end(self, index: int) -> None:
        if index in self.shards:
            self.ended.append(self.shards.pop(index))
            self.looks.pop(index).cancel()

    def lose(self, index: int) -> None:
        """Handles here do not age."""

    async def owner(self, key: str, shards: ShardSet, method: str, *arguments):
        """The owner's answer, asked for as coordinator and engines do, and the set as it is known then."""
        while True:
            try:
                answer = await getattr(self.at(shard_of(key, shards.shards)), method).remote(*arguments)
            except (NoShard, ConnectionError):
                answer = Moved(await self.shards[0].learn(shards))
                await asyncio.sleep(0.1)
            if not isinstance(answer, Moved):
                return answer, shards
            shards = max(shards, answer.to)
            if answer.to < shards and (index := shard_of(key, shards.shards)) in self.shards:
                await self.shards[index].learn(shards)


class Engine:
    """Writes one sample of each group, and reads all of it."""

    def __init__(self, cluster: Cluster, number: int):
        self.cluster, self.number, self.set = cluster, number, ShardSet(0, 1)
        self.cursors: dict[GroupRef, Cursor] = dict.fromkeys(GROUPS, NOWHERE)
        self.known: dict[tuple[GroupRef, int], dict[int, int]] = {}
        self.heard = 0

    async def exchange(self, group: GroupRef, start: int, tokens: list[int]) -> None:
        packet = Packet.of([Piece(group, self.number, start, np.array(tokens, np.int32))] if tokens else [])
        asked = f"engine-{self.number}", packet, [Want(group, self.cursors[group])]
        (news, cursors), self.set = await self.cluster.owner(group.prompt_key, self.set, "exchange", *asked)
        self.cursors[group] = cursors[0]
        for piece in news.pieces():
            known = self.known.setdefault((group, piece.sample_index), {})
            known.update(enumerate(piece.tokens.tolist(), piece.start))
            self.heard += len(piece.tokens)


@contextmanager
def virtual():
    loop = VirtualLoop()
    try:
        yield loop
        assert loop.errors == []
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_a_group_that_has_ended_is_there_until_late_tokens_have_come():
    async def work():
        config = ContextConfig(linger_s=1.0, flush_s=0.5)
        shard, group = ContextShard(config, 0), GROUPS[0]
        piece = Piece(group, 0, 0, np.arange(4, dtype=np.int32))
        await shard.exchange("a", Packet.of([piece]), [])
        ending = asyncio.ensure_future(shard.end(group))
        await asyncio.sleep(2.9)
        news, _ = await shard.exchange("b", Packet.of([]), [Want(group, NOWHERE)])
        assert len(news.tokens) == 4 and not ending.done()
        await ending
        assert (await shard.status())["groups"] == 0

    with virtual() as loop:
        loop.run_until_complete(work())


def test_a_shard_answers_for_its_own_prompts_alone():
    async def work():
        shard = ContextShard(ContextConfig(shards=2), 0)
        own = next(group for group in GROUPS if shard_of(group.prompt_key, 2) == 0)
        other = next(group for group in GROUPS if shard_of(group.prompt_key, 2) == 1)
        moved, answers = Moved(ShardSet(0, 2)), [Answer(0, 1, None, True, np.arange(3, dtype=np.int32))]
        assert await shard.finish(own, 1, answers) is None and await shard.finish(other, 1, answers) == moved
        assert await shard.reward(own.prompt_key, 1, {0: 1.5, 9: 2.0}) is None
        assert await shard.reward(other.prompt_key, 1, {0: 1.5}) == moved
        assert list(await shard.lengths([own.prompt_key])) == [own.prompt_key]
        assert await shard.lengths([own.prompt_key, other.prompt_key]) == moved
        assert await shard.past([other]) == moved and await shard.end(other) == moved
        assert await shard.exchange("a", Packet.of([]), [Want(other, NOWHERE)]) == moved
        status = await shard.status()
        assert (status["counts"]["recorded_answers"], status["counts"]["rewarded_answers"]) == (1, 1)
        assert await shard.forget_history() == 1

    with virtual() as loop:
        loop.run_until_complete(work())


def test_a_look_at_a_shard_forgets_groups_that_nobody_touches():
    async def work():
        shard = ContextShard(ContextConfig(ttl_s=10.0), 0)
        await shard.exchange("a", Packet.of([Piece(GROUPS[0], 0, 0, np.arange(4, dtype=np.int32))]), [])
        await asyncio.sleep(9.0)
        assert (await shard.status())["groups"] == 1
        await asyncio.sleep(2.0)
        status = await shard.status()
        assert (status["groups"], status["live_bytes"]) == (0, 0)

    with virtual() as loop:
        loop.run_until_complete(work())


async def rounds(cluster: Cluster, engines: list[Engine], number: int) -> None:
    for turn in range(number):
        for group in GROUPS:
            for engine in engines:
                await engine.exchange(group, 3 * turn, [turn, turn + 1, engine.number])


@pytest.mark.parametrize("failing", [0.0, 0.3])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_shards_come_and_go_and_nothing_is_lost(tmp_path, seed, on_disk, failing):
    async def work():
        cluster = Cluster(ContextConfig(history_dir=str(tmp_path) if on_disk else None), seed)
        cluster.failing = failing
        engines, known = [Engine(cluster, number) for number in range(2)], ShardSet(0, 1)
        writing = asyncio.ensure_future(rounds(cluster, engines, 40))
        tasks = []
        for step, shards in enumerate((3, 1, 4, 2, 1)):
            tasks.append(asyncio.ensure_future(cluster.shards[0].resize(shards, ShardSet(0, 0))))
            for group in GROUPS:
                answers = [Answer(10 + step, 0, None, True, np.full(5, step, np.int32))]
                _, known = await cluster.owner(group.prompt_key, known, "finish", group, step, answers)
            await asyncio.sleep(cluster.rng.random() * 8)
        await asyncio.gather(writing, *tasks)
        cluster.failing = 0.0
        await cluster.shards[0].resize(1, ShardSet(0, 0))
        await asyncio.sleep(120.0)
        for engine in engines:
            for group in GROUPS:
                await engine.exchange(group, 0, [])
        lengths, _ = await cluster.owner(GROUPS[0].prompt_key, known, "lengths", [g.prompt_key for g in GROUPS])
        return cluster, engines, lengths

    with virtual() as loop:
        cluster, engines, lengths = loop.run_until_complete(work())
        assert list(cluster.shards) == [0] and cluster.ended, "the others have ended"
        statuses = [loop.run_until_complete(shard.status()) for shard in cluster.ended]
        assert all((status["groups"], status["to_hand_over"]) == (0, 0) for status in statuses)
        assert {key: [length.epoch for length in of] for key, of in lengths.items()} == {
            group.prompt_key: [4, 3, 2, 1, 0] for group in GROUPS
        }
        for engine in engines:
            mate = engines[1 - engine.number]
            whole = [token for turn in range(40) for token in (turn, turn + 1, mate.number)]
            for group in GROUPS:
                known = engine.known[group, mate.number]
                assert [known[position] for position in range(len(whole))] == whole
        handed = [
            sum(status["counts"].get(what, 0) for status in statuses) for what in ("handed_groups", "handed_files")
        ]
        assert all(number > 0 for number in handed)
        if not failing:
            assert statuses and sum(status["missed_files"] for status in statuses) == 0
            assert engines[0].heard <= len(GROUPS) * (120 + 25), "groups that moved were not sent again"
