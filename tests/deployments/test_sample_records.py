"""The ledger's half of law 1: a chunk is written once, where its sample stands."""

from dataclasses import replace

import numpy as np
import pytest

from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.batches.records import GroupRecord, escaped
from tailrace.deployments.messages.chunk import ChunkResult, sample_key
from tailrace.deployments.messages.rollout import PromptGroup
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.policies.protocol.actions import SampleEnd
from tailrace.policies.protocol.events import ChunkEnd


def record():
    group = PromptGroup(prompt_id="p", token_ids=(1, 2, 3), samples=2, forced_token_ids=((7, 8), (9,)))
    return GroupRecord.of("b", 7, Prepared(group, (1, 2, 3), 16, "key"), [sample_key(0, 0, "p", i) for i in range(2)])


def chunk(tokens, version=0) -> ChunkResult:
    return ChunkResult(
        chunk_id="c", token_ids=np.asarray(tokens, np.int32), logprobs=np.full(len(tokens), -1.0, np.float32),
        raw_logprobs=np.full(len(tokens), -2.0, np.float32), end=ChunkEnd.LENGTH, weights_version=version,
        queue_s=0.5, prefill_s=1.0, decode_s=2.0, cached_tokens=0, computed_tokens=3,
    )  # fmt: skip


def test_tokens_grow_and_the_context_is_prompt_then_answer():
    sample = record().samples[0]
    sample.append(0, chunk([4, 5]), "r1")
    sample.append(2, chunk([6]), "r1")
    assert sample.context().tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.context().dtype == np.int32


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_chunk_elsewhere_than_where_the_sample_stands_is_refused(start):
    sample = record().samples[0]
    sample.append(0, chunk([4, 5]), "r1")
    with pytest.raises(ValueError, match="the sample has 2 tokens"):
        sample.append(start, chunk([6]), "r1")
    assert sample.tokens == 2


def test_segments_join_while_replica_and_version_stay():
    sample = record().samples[0]
    chunks = ((0, [1, 2], "r1", 0), (2, [3], "r1", 0), (3, [4], "r2", 0), (4, [5], "r2", 1))
    for start, tokens, replica, version in chunks:
        sample.append(start, chunk(tokens, version), replica)
    spans = [(s.replica_id, s.weights_version, s.start, s.end) for s in sample.segments]
    assert spans == [("r1", 0, 0, 3), ("r2", 0, 3, 4), ("r2", 1, 4, 5)]


def test_a_chunk_without_tokens_makes_no_segment():
    sample = record().samples[0]
    sample.append(0, chunk([]), "r1")
    assert sample.segments == [] and sample.tokens == 0


def routes(*first: int) -> np.ndarray:
    return np.array([[[one, one + 1]] for one in first], np.uint8).reshape(len(first), 1, 2)


def test_a_sample_has_the_routes_of_its_chunks_in_order_and_a_next_turn_those_that_follow():
    """A chunk that never began has none; the next one is asked for all that is missing."""
    sample = record().samples[0]
    sample.append(0, replace(chunk([4, 5]), routed_experts=routes(10, 11, 12, 13)), "r1")
    sample.append(2, chunk([]), "r2")
    assert sample.routed == 4
    sample.append(2, replace(chunk([6]), routed_experts=routes(14)), "r2")
    sample.end = SampleEnd.STOP
    assert sample.result_without_text("").routed_experts.array[:, 0, 0].tolist() == [10, 11, 12, 13, 14]
    after = sample.next_turn(1, np.array([1, 2, 3, 4, 5, 6, 8], np.int32), 4, 0.0, 0.0)
    assert after.routed == 5
    after.append(3, replace(chunk([9]), routed_experts=routes(15, 16)), "r1")
    after.end = SampleEnd.STOP
    assert after.result_without_text("").routed_experts == RoutedExperts(routes(15, 16)) and after.routed == 7


def test_a_sample_of_a_model_without_experts_has_no_routes():
    sample = record().samples[0]
    sample.append(0, chunk([4, 5]), "r1")
    sample.end = SampleEnd.STOP
    assert sample.result_without_text("").routed_experts is None


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 3), np.uint8), np.zeros((2, 3, 1), np.int64), "AAAA", "no base64", "", 3, [1]]
)
def test_what_is_no_routes_is_refused(wrong):
    with pytest.raises(ValueError):
        RoutedExperts.of(wrong)


class Words:
    """Stands for the tokenizer: a text that shows which tokens it was made of."""

    def decode(self, token_ids) -> str:
        return " ".join(map(str, token_ids))


@pytest.mark.parametrize("chunks", [[], [[]], [[4, 5], [], [6]]])
def test_a_result_holds_the_chunks_in_order_as_plain_numbers(chunks):
    sample = record().samples[0]
    sample.end = SampleEnd.STOP
    for tokens in chunks:
        sample.append(sample.tokens, chunk(tokens), "r1")
    result = sample.result(Words())
    made = tuple(token for tokens in chunks for token in tokens)
    assert result.token_ids == made and result.text == " ".join(map(str, made[:-1]))
    assert result.logprobs == (-1.0,) * len(made) and result.raw_logprobs == (-2.0,) * len(made)
    assert {type(each) for each in result.token_ids} <= {int} and {type(each) for each in result.logprobs} <= {float}


def test_a_logprob_keeps_its_bits():
    sample = record().samples[0]
    sample.end = SampleEnd.STOP
    value = np.float32(-0.1)
    sample.append(0, replace(chunk([4]), logprobs=np.array([value])), "r1")
    assert sample.result(Words()).logprobs == (float(value),) != (-0.1,)


def test_every_sample_has_its_own_key_and_replay():
    first, second = record().samples
    assert first.key != second.key
    assert first.forced.tolist() == [7, 8] and second.forced.tolist() == [9]


def test_a_later_turn_begins_with_all_before_it_and_counts_its_own():
    group = record()
    first = group.samples[1]
    first.append(0, chunk([4, 5]), "r1")
    first.end = SampleEnd.LENGTH
    turn = first.next_turn(
        key=9, prompt=np.array([1, 2, 3, 4, 5, 70, 71], np.int32), max_tokens=8, hold_s=0.0, now_s=3.0
    )
    turn.append(2, chunk([6]), "r1")
    turn.append(3, chunk([7, 8]), "r2")
    assert turn.context().tolist() == [1, 2, 3, 4, 5, 70, 71, 6, 7, 8]
    assert (turn.tokens, turn.earlier_tokens, turn.outside_tokens, turn.max_tokens) == (5, 2, 2, 10)
    assert [(segment.replica_id, segment.start, segment.end) for segment in turn.segments] == [
        ("r1", 0, 1),
        ("r2", 1, 3),
    ]
    whole = turn.answer()
    assert whole.tokens.tolist() == [4, 5, 70, 71, 6, 7, 8] and whole.outside_tokens == 2
    with pytest.raises(ValueError, match="the sample has 5 tokens"):
        turn.append(0, chunk([6]), "r1")


def test_the_first_turn_has_the_key_of_the_sample_and_each_later_one_its_own():
    keys = [sample_key(0, 0, "p", 0, turn) for turn in range(4)] + [sample_key(0, 0, "p", 10), sample_key(0, 0, "p", 1)]
    assert keys[0] == sample_key(0, 0, "p", 0) and len(set(keys)) == 6


def test_the_sample_key_depends_on_all_it_is_made_of():
    keys = {sample_key(*of) for of in ((0, 0, "p", 0), (1, 0, "p", 0), (0, 1, "p", 0), (0, 0, "q", 0), (0, 0, "p", 1))}
    assert len(keys) == 5 and all(0 <= key < 1 << 64 for key in keys)
    assert sample_key(0, 0, "p", 0) == 17307229011157614051, "keys must never change between releases"


def test_groups_of_two_batches_never_share_a_name():
    def ref(batch_id: str, prompt_id: str) -> str:
        prepared = Prepared(PromptGroup(prompt_id=prompt_id, token_ids=(1,), samples=1), (1,), 16, "key")
        return GroupRecord.of(batch_id, 0, prepared, [1]).ref.group_id

    names = [("a", "b/c"), ("a/b", "c"), ("a%2Fb", "c"), ("a%252Fb", "c"), ("step-0", "sky")]
    assert len({ref(*name) for name in names}) == len(names)
    assert ref("step-0", "sky") == "step-0/sky"
    assert len({escaped(name, "#") for name in ("p", "p#0", "p%230", "p%")}) == 4
