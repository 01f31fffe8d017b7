"""A column reads as the tuple of its numbers, keeps their bits, and crosses processes as one buffer."""

import copy
import json
import pickle
from operator import add

import numpy as np
import pytest
from pydantic import ValidationError

from tailrace.deployments.messages.rollout import GroupResult, SampleResult, Segment
from tailrace.deployments.results.columns import LOGPROBS, TOKENS, Column

NUMBERS = (5, -6, 2**31 - 1)


def sample(**changes) -> SampleResult:
    fields = {"token_ids": (5, 6), "text": "a", "logprobs": (-1.0, -0.5), "raw_logprobs": (-2.0, -1.5)}
    return SampleResult(**{"sample_index": 0, "finish_reason": "stop"} | fields | changes)


def test_a_column_reads_as_its_tuple():
    column = TOKENS.checked(NUMBERS)
    assert column == NUMBERS and column == list(NUMBERS) and hash(column) == hash(NUMBERS)
    assert column != NUMBERS[:2] and column not in ((5, -6, 7), "abc") and column != TOKENS.checked(NUMBERS[1:])
    assert (*column,) == NUMBERS and [*reversed(column)] == [*reversed(NUMBERS)] and repr(column) == repr(NUMBERS)
    assert column[0] == 5 and column[-1] == NUMBERS[-1] and type(column[np.int64(1)]) is int
    assert column[1:] == NUMBERS[1:] and column[::-1] == NUMBERS[::-1] and column[3:] == () and not column[3:]
    assert column.index(-6) == 1 and column.count(5) == 1 and -6 in column and 7 not in column
    assert {type(each) for each in column} == {int} and {type(each) for each in LOGPROBS.checked([1, 2.5])} == {float}
    assert add(column, (1,)) == (*NUMBERS, 1) and add((1,), column) == add([1], column) == (1, *NUMBERS)
    assert column + column == NUMBERS * 2 and [*column[:1], 9] == [5, 9]
    with pytest.raises(IndexError):
        column[3]


def test_its_array_is_a_view_that_cannot_be_written():
    array = np.arange(4, dtype=np.int32)
    column = Column(array)
    assert np.shares_memory(column.array, array) and np.shares_memory(column[1:].array, array)
    assert np.asarray(column) is column.array and np.asarray(column, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        column.array[0] = 1
    assert array.flags.writeable, "the owner may still write, and must not"


def test_a_given_array_may_change_later_and_the_column_does_not():
    array = np.array([1, 2], np.int32)
    column = TOKENS.checked(array)
    array[0] = 9
    assert column == (1, 2)


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e300, float("-inf")])
def test_a_logprob_keeps_its_bits(value):
    assert LOGPROBS.checked([value]) == (value,)
    assert LOGPROBS.checked(np.array([value], np.float32)).array.dtype == np.float32
    short = float(np.float32(0.1))
    assert LOGPROBS.checked([short, float("nan")]).array.dtype == np.float32


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("12", "give numbers in one list"),
        (5, "give numbers in one list"),
        ({"a": 1}, "give numbers in one list"),
        ([[1], [2]], "give numbers in one list"),
        ([1.5], "give whole numbers in one list"),
        ([True], "give whole numbers in one list"),
        (["1"], "give whole numbers in one list"),
        ([None], "give whole numbers in one list"),
        ([2**31], "2147483648 does not fit 32 bits"),
        ([-(2**40), 1], "-1099511627776 does not fit 32 bits"),
        ([2**70], "give whole numbers in one list"),
    ],
)
def test_ill_formed_tokens_are_refused_in_one_line(values, reason):
    with pytest.raises(ValidationError) as refused:
        sample(token_ids=values)
    (error,) = refused.value.errors()
    assert error["loc"] == ("token_ids",) and error["msg"] == f"Value error, {reason}"


@pytest.mark.parametrize("values", [["a"], [None], [True], [1j], [[1.0], [2.0]], [[1.0], 2.0]])
def test_ill_formed_logprobs_are_refused(values):
    with pytest.raises(ValidationError):
        sample(logprobs=values)


@pytest.mark.parametrize("kind", [list, tuple, np.array, iter, TOKENS.checked])
def test_any_list_of_numbers_is_taken(kind):
    assert (
        sample(token_ids=kind([5, 6])) == sample() and sample(token_ids=kind([5, 6])).token_ids.array.dtype == np.int32
    )
    assert sample(token_ids=kind([])).token_ids.array.dtype == np.int32 and sample(token_ids=()).token_ids == ()


def test_json_is_the_list_that_it_was():
    whole = sample(logprobs=(-1.0, float("-inf")))
    found = json.loads(whole.model_dump_json())
    assert found["token_ids"] == [5, 6] and found["logprobs"] == [-1.0, None] and found["raw_logprobs"] == [-2.0, -1.5]
    assert whole.model_dump(mode="json")["token_ids"] == [5, 6] and whole.model_dump()["token_ids"] == (5, 6)
    assert SampleResult.model_validate_json(sample().model_dump_json()) == sample()
    assert SampleResult.model_json_schema()["properties"]["token_ids"]["items"] == {"type": "integer"}


def test_its_array_is_pickled_as_a_buffer_of_its_own():
    column, buffers = TOKENS.checked(range(100_000)), []
    packed = pickle.dumps(column[10:50_010], 5, buffer_callback=buffers.append)
    (buffer,) = buffers
    assert len(packed) < 1_000 and len(buffer.raw()) == 200_000, "a slice takes its own part alone"
    back = pickle.loads(packed, buffers=[buffer.raw().toreadonly()])
    assert back == column[10:50_010] and np.shares_memory(back.array, column.array)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_equal_and_read_only(again):
    group = GroupResult(batch_id="b", prompt_id="p", prompt_token_ids=(1,), samples=(sample(),))
    found = again(group)
    assert found == group and type(found.samples[0].token_ids) is Column
    assert not found.samples[0].logprobs.array.flags.writeable


def test_each_token_has_a_weights_version():
    made = [Segment(weights_version=v, replica_id="r", start=a, end=b) for v, a, b in ((3, 0, 2), (5, 2, 3))]
    versions = sample(token_ids=(1, 2, 3), segments=made).versions
    assert versions == (3, 3, 5) and versions.array.dtype == np.int32 and sample().versions == ()
