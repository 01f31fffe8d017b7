"""The benchmarks of the KV pool, without engines: what they refuse, what they compute, and what a sample does."""

import os
import re

import numpy as np
import pytest

from tailrace.app.cli import run
from tailrace.deployments.messages.chunk import ChunkResult, EngineStats
from tailrace.kvpool.keys import block_name, version_of, version_pattern
from tailrace.lab.benchmarks.pool.kvpool import break_even
from tailrace.lab.benchmarks.pool.pool_testbed import keys_of
from tailrace.lab.benchmarks.pool.soak import CHUNK_TOKENS, PROMPT_TOKENS, SoakSample, Watch, growth_percent
from tailrace.policies.protocol.events import ChunkEnd


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["kvpool", "--lengths", "long"], "--lengths long: give numbers from 64 to 8064"),
        (["kvpool", "--lengths", ""], "--lengths"),
        (["kvpool", "--lengths", "256,32"], "--lengths 256,32"),
        (["kvpool", "--lengths", "256,9000"], "--lengths 256,9000"),
        (["kvpool", "--repeats", "0"], "--repeats"),
        (["soak", "--moves", "100"], "--moves"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, said, capsys):
    assert run(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def line(base_ms: float, token_ms: float, lengths=(256, 1024, 4096)) -> dict[int, float]:
    return {length: base_ms + token_ms * length for length in lengths}


@pytest.mark.parametrize(
    "move_ms, recompute_ms, tokens",
    [
        (line(90, 1), line(10, 2), 80.0),  # 90 + n = 10 + 2 n
        (line(5, 1), line(10, 2), 0.0),  # always quicker
        (line(5, 2), line(10, 2), 0.0),
        (line(90, 3), line(10, 2), None),  # never
        (line(5, 3), line(10, 2), None),  # quicker for the shortest alone
        (line(90, 1, [256]), line(10, 2, [256]), None),  # one length tells nothing
    ],
)
def test_where_moving_begins_to_pay(move_ms, recompute_ms, tokens):
    assert break_even(move_ms, recompute_ms) == tokens


def test_keys_are_spelled_as_the_pool_spells_them():
    names = block_name(3, bytes(range(32))) + block_name(3, bytes(32))
    stats = EngineStats("r", 3, 32, 10, 4, 128, 0, 0.0, key_prefixes=("a", "b"))
    keys = keys_of(stats, names)
    assert len(set(keys)) == 4 and {key.partition("@")[0] for key in keys} == {"a", "b"}
    assert all(version_of(key) == 3 and re.search(version_pattern(3), key) for key in keys)


def result_of(sample: SoakSample, end: ChunkEnd) -> ChunkResult:
    tokens, none = np.arange(CHUNK_TOKENS, dtype=np.int32), np.zeros(0, np.float32)
    return ChunkResult("c", tokens, none, none, end, 0, 0.0, 0.0, 0.0, 0, 0, kv_names=b"names")


def test_a_sample_changes_sides_at_every_chunk_end_until_it_has_its_length():
    sample, plans, sides = SoakSample(1, 0), [], []
    goes_on = True
    while goes_on:
        chunk = sample.chunk()
        assert chunk.prompt_tokens == PROMPT_TOKENS and len(chunk.token_ids) == len(sample.tokens)
        plans.append(chunk.kv)
        sides.append(sample.side)
        goes_on = sample.take(result_of(sample, ChunkEnd.LENGTH))
    assert sides == [number % 2 for number in range(len(sides))] and len(sides) > 2
    assert plans[0].min_pull_tokens is None and all(plan.min_pull_tokens for plan in plans[1:])
    assert [plan.save for plan in plans] == [True] * (len(plans) - 1) + [False]
    assert sample.most_tokens <= len(sample.tokens) < sample.most_tokens + CHUNK_TOKENS
    assert sample.kv_names == b"names"


def test_a_sample_that_stops_is_over():
    assert not SoakSample(1, 0).take(result_of(SoakSample(1, 0), ChunkEnd.STOP))


def test_growth_is_from_the_first_look_after_settling_to_the_last():
    seen = {0: {"a": 50, "b": 10}, 60: {"a": 80, "b": 10}, 105: {"a": 100, "b": 10}, 200: {"a": 110, "b": 9}}
    assert growth_percent(seen, 100) == {"a": 10.0, "b": -10.0}


def test_memory_is_looked_at_every_fifty_moves_and_told_every_hundred():
    said = []
    watch = Watch({"me": os.getpid()}, said.append)
    for moves in (0, 8, 56, 96, 104, 144, 152, 230):
        watch.look(moves)
    assert list(watch.seen) == [0, 56, 104, 152, 230]
    assert [text.split()[0] for text in said] == ["104", "230"]
    assert all(resident["me"] > 0 for resident in watch.seen.values())
