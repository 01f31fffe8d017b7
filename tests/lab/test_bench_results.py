"""The coordinator of `bench results`: all of a batch's tokens come, and its watch sees a loop that is held."""

import asyncio
import time

import pytest
from test_later_text import NamedWords

from tailrace.app.cli import run
from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.messages.roles import Role
from tailrace.lab.benchmarks.control_plane.results import GROUP_SAMPLES, batch_of, touched
from tailrace.lab.benchmarks.control_plane.results_source import CHUNK_TOKENS, LoopWatch, ResultSource, resident_bytes


class PreparingWords(NamedWords):
    def prepare(self, message):
        return [Prepared(group, group.token_ids, group.max_tokens, group.prompt_id) for group in message.groups]


def test_groups_come_as_they_end_with_all_their_tokens():
    lengths = [CHUNK_TOKENS + 3, 5, CHUNK_TOKENS]

    async def story():
        source = ResultSource(PreparingWords())
        return [group async for group in source.rollout(Role.TRAINER, batch_of("b", lengths), "driver", [])]

    groups = asyncio.run(story())
    assert [group.prompt_id for group in groups] == ["1", "2", "0"]
    assert list(touched(groups)) == [
        length for length in (5, CHUNK_TOKENS, CHUNK_TOKENS + 3) for _ in range(GROUP_SAMPLES)
    ]


def test_a_watch_sees_how_long_another_callback_holds_the_loop():
    async def story() -> LoopWatch:
        watch = LoopWatch()
        watching = asyncio.ensure_future(watch.watch(0.2))
        await asyncio.sleep(0)
        time.sleep(0.05)
        await watching
        return watch

    watch = asyncio.run(story())
    assert watch.held_s >= 0.05 > watch.held_cpu_s >= 0.0


def test_the_kernel_counts_own_and_shared_pages():
    assert 0 < resident_bytes("RssAnon") <= resident_bytes("RssAnon", "RssShmem", "RssFile")


@pytest.mark.parametrize("option", ["--samples", "--tokens", "--repeats"])
def test_too_few_of_anything_is_refused(capsys, option):
    assert run(["bench", "results", option, "0"]) == 2
    assert option in capsys.readouterr().err
