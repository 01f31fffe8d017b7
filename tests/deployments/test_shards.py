"""Laws of the shards of the group context: each prompt has one, and each shard keeps and forgets its own groups."""

import asyncio
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.group_log import NOWHERE
from tailrace.deployments.context.history import Answer, prompt_key
from tailrace.deployments.context.live_groups import Packet, Want
from tailrace.deployments.context.prompt_files import EVERY, FILES, file_of, shard_of, shards_files
from tailrace.deployments.context.shard import ContextShard
from tailrace.deployments.messages.context import GroupRef, Piece
from tailrace.lab.fuzz.virtual_time import VirtualLoop

GROUPS = [GroupRef(f"batch/p{number}", prompt_key(f"prompt {number}")) for number in range(12)]


@given(st.integers(1, FILES))
def test_each_file_has_one_shard_and_shards_have_about_as_many(shards):
    files = [shards_files(index, shards) for index in range(shards)]
    assert sorted(file for of in files for file in of) == list(EVERY)
    assert max(map(len, files)) - min(map(len, files)) <= 1


@pytest.mark.slow
@given(st.text(), st.integers(1, FILES))
def test_a_prompts_shard_is_that_of_its_file(key, shards):
    assert file_of(key) in shards_files(shard_of(key, shards), shards)


@pytest.mark.parametrize(("replicas", "shards"), [(0, 1), (1, 1), (64, 1), (65, 2), (512, 8), (5000, 16)])
def test_the_number_of_shards_follows_the_replicas(replicas, shards):
    assert ContextConfig().for_replicas(replicas).shards == shards
    assert ContextConfig(shards=3).for_replicas(replicas).shards == max(shards, 3)


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


def test_answers_and_rewards_are_the_history_of_later_groups():
    async def work():
        shard, own = ContextShard(ContextConfig(), 0), GROUPS[0]
        answers = [Answer(0, 1, None, True, np.arange(3, dtype=np.int32))]
        await shard.finish([(own, 1, answers)])
        await shard.reward(own.prompt_key, 1, {0: 1.5, 9: 2.0})
        assert list(await shard.lengths([own.prompt_key])) == [own.prompt_key]
        assert [
            (past.reward, len(past.tokens)) for past in (await shard.past([GROUPS[0]._replace(group_id="next")]))[0]
        ] == [(1.5, 3)]
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
