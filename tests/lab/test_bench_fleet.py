"""The load of `bench fleet`."""

from statistics import mean

import pytest

from tailrace.app.cli import run
from tailrace.deployments.messages.chunk import sample_key
from tailrace.lab.benchmarks.control_plane.fleet_load import (
    CHUNK_TOKENS,
    MAX_TOKENS,
    Age,
    LoadPiece,
    aged,
    length_of,
    piece,
)


def answer(key: int, age: Age) -> list[LoadPiece]:
    """The chunks of one answer."""
    pieces, done = [], 0
    while not (pieces and pieces[-1].stops):
        pieces.append(piece(key, age, done, min(CHUNK_TOKENS, MAX_TOKENS - done)))
        done += pieces[-1].tokens
    return pieces


def test_answers_are_of_20_000_tokens_with_a_tail():
    lengths = [length_of(key) for key in range(4_000)]
    assert 19_000 < mean(lengths) < 21_000 and max(lengths) == MAX_TOKENS
    assert all(length_of(key, above=30_000) > 30_000 for key in range(100))


@pytest.mark.parametrize("tokens", [0, 5_000, 20_000])
def test_a_part_that_had_been_made_takes_no_time_or_is_left_out(tokens):
    for key in range(50):
        made = answer(key, Age(tokens, True))
        assert sum(one.tokens for one in made) == length_of(key)
        assert sum(one.at_once for one in made) == min(tokens, length_of(key))
        left = answer(key, Age(tokens, False))
        assert sum(one.tokens for one in left) == length_of(key, above=tokens) - tokens
        assert [one.early for one in left[1:]] == [False] * (len(left) - 1), "only the first one ends early"


def test_a_fleet_begins_in_the_middle_of_a_run():
    groups, unended = aged(320, made=False)
    assert 320 <= unended < 336 and sum(group.samples for group in groups) == unended
    whole, same = aged(320, made=True)
    assert same == unended and {group.samples for group in whole} == {16}
    left = [length_of(sample_key(0, 0, one.prompt_id, n)) > one.token_ids[0] for one in whole for n in range(16)]
    assert sum(left) == unended


@pytest.mark.parametrize("option", ["--replicas", "--running", "--seconds", "--speed"])
def test_none_of_anything_is_refused(capsys, option):
    assert run(["bench", "fleet", option, "0"]) == 2
    assert option in capsys.readouterr().err
