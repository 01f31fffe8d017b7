"""Names of a trainer's prompts within a step."""

from types import SimpleNamespace

import pytest

from tailrace.app.errors import BadInput
from tailrace.app.trl.generation import attach
from tailrace.app.trl.turns import Turn, Turns


def test_groups_are_called_after_their_call_and_place():
    turns = Turns()
    assert turns.call([[1, 2], [3]], 4) == [Turn("0.0", 2), Turn("0.1", 1)]
    assert turns.call([[1, 2]], 4) == [Turn("1.0", 2)], "the same prompt in a later call is another group"


def test_a_later_turn_is_called_after_its_sample_whatever_the_order():
    turns = Turns()
    first, second = turns.call([[1, 2], [3]], 2)
    for turn, index, tokens in ((first, 0, [1, 2, 9]), (first, 1, [1, 2, 8]), (second, 1, [3, 7])):
        turns.ended(turn, index, tokens)
    found = turns.call([[3, 7, 5], [1, 2, 8, 5], [4]], 1)
    assert found == [Turn("0.1/1", 1), Turn("0.0/1", 2), Turn("1.2", 1)]
    turns.ended(found[0], 0, [3, 7, 5, 6])
    assert turns.call([[3, 7, 5, 6, 0]], 1) == [Turn("0.1/1/0", 1)]


def test_equal_samples_are_taken_once_each():
    turns = Turns()
    (turn,) = turns.call([[1]], 2)
    turns.ended(turn, 0, [1, 9])
    turns.ended(turn, 1, [1, 9])
    assert [each.prompt_id for each in turns.call([[1, 9, 5], [1, 9, 5]], 1)] == ["0.0/0", "0.0/1"]


def test_tools_are_refused_where_processes_would_wait_for_each_others_turns():
    several = SimpleNamespace(
        use_vllm=False, rollout_func=None, tools=[len], accelerator=SimpleNamespace(num_processes=2)
    )
    with pytest.raises(BadInput, match="tools with several processes: "):
        attach(several, client=None)
