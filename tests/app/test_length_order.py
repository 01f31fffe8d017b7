"""Batches of like length: every prompt once an epoch, whole groups, and no order that tells the length of a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import LengthOrder, PromptGroup
from tailrace.app.calls.length_order import by_like_length
from tailrace.deployments.messages.rollout import GroupResult, SampleResult


def prompts(count: int) -> list[PromptGroup]:
    return [PromptGroup(prompt_id=f"p{number}", token_ids=(1, 2), samples=2) for number in range(count)]


def ended(prompt_id: str, *lengths: int) -> GroupResult:
    samples = [
        SampleResult(
            sample_index=index, token_ids=(1,) * tokens, text="", logprobs=(0.0,) * tokens,
            raw_logprobs=(0.0,) * tokens, finish_reason="stop", segments=(),
        )
        for index, tokens in enumerate(lengths)
    ]  # fmt: skip
    return GroupResult(batch_id="b", prompt_id=prompt_id, prompt_token_ids=(1, 2), samples=tuple(samples))


@given(
    lengths=st.lists(st.one_of(st.none(), st.integers(1, 9)), max_size=20),
    groups=st.integers(1, 6),
    seed=st.integers(0, 3),
)
def test_an_epoch_has_every_prompt_once(lengths, groups, seed):
    given_prompts = prompts(len(lengths))
    known = {f"p{number}": tokens for number, tokens in enumerate(lengths) if tokens is not None}
    order = LengthOrder(groups, seed, known)
    for _ in range(2):
        batches = list(order.batches(given_prompts))
        assert sorted(one.prompt_id for batch in batches for one in batch) == sorted(p.prompt_id for p in given_prompts)
        assert all(len(batch) == groups for batch in batches[:-1])
        assert all(one is given_prompts[int(one.prompt_id[1:])] for batch in batches for one in batch), "groups whole"
    assert list(LengthOrder(groups, seed, known).batches(given_prompts)) == list(
        LengthOrder(groups, seed, known).batches(given_prompts)
    )


def test_batches_have_like_lengths_once_they_are_known():
    order = LengthOrder(groups=5, seed=1)
    first = list(order.batches(prompts(50)))
    assert [one.prompt_id for batch in first for one in batch] == [f"p{number}" for number in range(50)]
    for batch in first:
        for one in batch:
            number = int(one.prompt_id[1:])
            order.record(ended(one.prompt_id, 1, 1 + number * 17 % 50))
    second = [[int(one.prompt_id[1:]) * 17 % 50 for one in batch] for batch in order.batches(prompts(50))]
    assert all(max(batch) - min(batch) == 4 for batch in second)
    assert [min(batch) for batch in second] != sorted(min(batch) for batch in second)
    third = [[int(one.prompt_id[1:]) * 17 % 50 for one in batch] for batch in order.batches(prompts(50))]
    assert sorted(map(min, third)) == sorted(map(min, second)) and third != second, "another order of the same"


def test_an_unknown_prompt_counts_as_average():
    names = [f"p{number}" for number in range(4)]
    found = by_like_length(names, {"p0": 9, "p1": 1, "p3": 8}, [2, 2], lambda part: b"%d" % part, str)
    assert found == ["p1", "p2", "p0", "p3"]


def test_sizes_add_up():
    with pytest.raises(ValueError, match="sizes of 3 prompts in all, and 2 prompts"):
        by_like_length(["a", "b"], {}, [3], lambda part: b"", str)
