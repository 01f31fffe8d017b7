"""A sample's record: its parts in order, its result with everything that its chunks said, and its chunks' requests."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_metrics import result

from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.batches.open_batch import OpenBatch
from tailrace.deployments.batches.open_sessions import OpenSessions
from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.deployments.messages.drafts import DraftReport
from tailrace.deployments.messages.rollout import BatchSettings, PromptGroup, RolloutBatch
from tailrace.deployments.messages.session import SampleRequest
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import EndSample, SampleEnd, StartChunk
from tailrace.policies.protocol.events import Prediction

GROUP = PromptGroup(prompt_id="p", token_ids=(1, 2, 3), samples=3, max_tokens=80)
START = StartChunk(
    chunk_id="c", sample_id="b/p#2", replica_id="r", start=0, max_tokens=2, weights_version=0, kv_version=0,
    min_pull_tokens=None, expected_tokens=8, class_starts=(4, 8), reason="first", way=None, method=None,
)  # fmt: skip


def batch(**settings) -> LiveBatch:
    message = RolloutBatch(batch_id="b", groups=(GROUP,), step=7, **settings)
    prepared = [Prepared(GROUP, GROUP.token_ids, 80, "key")]
    return LiveBatch(message, "b", None, prepared, {}, submitted_s=10.0)


def part(number: int, **others) -> ChunkResult:
    """A chunk of two tokens, each of whose figures is its own."""
    drafts = DraftReport(1, np.full(6, number), np.full(6, 2 * number), np.array([3 * number, number]))
    values = {
        "token_ids": np.array([10 * number, 10 * number + 1], np.int32),
        "logprobs": np.array([-number, -number - 0.5], np.float32),
        "raw_logprobs": np.full(2, -9.0 * number, np.float32),
        "queue_s": 1.0 * number,
        "prefill_s": 2.0 * number,
        "decode_s": 4.0 * number,
        "cached_tokens": 10 * number,
        "computed_tokens": 100 * number,
        "verifications": number,
        "drafted_tokens": 5 * number,
        "accepted_tokens": 3 * number,
        "close_calls": (1,),
        "drafts": drafts,
        "top_logprobs": ({1: -1.0 * number},) * 2,
        "sampling_mask": ((number,),) * 2,
    }
    return replace(result(), chunk_id=f"c{number}", **(values | others))


def record(parts: int = 2):
    sample = batch().samples["b/p#2"]
    for number in range(1, parts + 1):
        sample.append(2 * (number - 1), part(number), f"r{number}", f"digest{number}")
    sample.end, sample.error, sample.started_s, sample.finished_s = SampleEnd.LENGTH, "why", 0.5, 9.0
    return sample


def test_a_result_has_the_figures_of_all_parts_in_their_order():
    found = record().result_without_text("tokenizer")
    assert list(found.token_ids) == [10, 11, 20, 21] and list(found.logprobs) == [-1.0, -1.5, -2.0, -2.5]
    assert list(found.raw_logprobs) == [-9.0, -9.0, -18.0, -18.0]
    assert (found.sample_index, found.finish_reason, found.error, found.chunks) == (2, SampleEnd.LENGTH, "why", 2)
    assert (found.cached_tokens, found.computed_tokens) == (30, 300)
    assert [(one.start, one.end, one.replica_id, one.weights_digest) for one in found.segments] == [
        (0, 2, "r1", "digest1"), (2, 4, "r2", "digest2")
    ]  # fmt: skip
    times = found.timings
    assert (times.started_s, times.finished_s, times.queue_s, times.prefill_s, times.decode_s) == (
        0.5,
        9.0,
        3.0,
        6.0,
        12,
    )
    assert (found.verifications, found.drafted_tokens, found.accepted_tokens) == (3, 15, 9)
    assert found.close_calls == (1, 3)
    assert found.top_logprobs == ({1: -1.0}, {1: -1.0}, {1: -2.0}, {1: -2.0})
    assert found.sampling_mask == ((1,), (1,), (2,), (2,)) and found.prompt_logprobs is None
    assert found.accepted_by_position == (9, 3) and set(found.drafted_by_source.values()) == {3}
    assert set(found.accepted_by_source.values()) == {6}


def test_a_part_that_does_not_continue_the_sample_is_refused_and_changes_nothing():
    sample = record(1)
    for start in (0, 1, 3):
        with pytest.raises(ValueError, match=f"chunk c9 begins at {start}, the sample has 2 tokens"):
            sample.append(start, part(9), "r")
    assert sample.tokens == 2 and len(sample.parts) == len(sample.segments) == 1


def test_the_names_of_a_sample_s_kv_are_those_that_were_reported_last():
    sample = batch().samples["b/p#2"]
    sample.append(0, part(1, kv_names=b"one"), "r")
    assert sample.kv_names == b"one" and sample.parts[0].kv_names == b""
    sample.append(2, part(2, kv_names=b""), "r")
    assert sample.kv_names == b"one", "this chunk has saved nothing"
    sample.append(4, part(3, kv_names=b"two"), "r")
    assert sample.kv_names == b"two"
    sample.append(6, part(4, kv_names=b"tw"), "r")
    assert sample.kv_names == b"two", "aborted in its context; the rest is in the pool yet"
    sample.append(8, part(5, kv_names=b"twofold"), "r")
    assert sample.kv_names == b"twofold"


def test_parts_of_one_replica_and_weights_are_one_segment():
    sample = batch().samples["b/p#2"]
    for start, replica in ((0, "a"), (2, "a"), (4, "b")):
        sample.append(start, part(1), replica, "d")
    assert [(one.replica_id, one.start, one.end) for one in sample.segments] == [("a", 0, 4), ("b", 4, 6)]


def test_a_chunk_s_drafts_are_planned_for_its_own_sample():
    of = batch()
    plan = of._draft_plan(of.samples["b/p#2"], START, Policies().drafting)
    assert (plan.sample_index, plan.epoch, plan.expected_tokens, plan.class_starts) == (2, 7, 8, (4, 8))
    assert plan.group == of.samples["b/p#2"].group.ref
    of.samples["b/p#2"].outside_tokens = 5
    plan = of._draft_plan(of.samples["b/p#2"], START, Policies().drafting)
    assert (plan.expected_tokens, plan.class_starts) == (13, (9, 13))


def test_a_session_that_is_not_there_is_not_closed():
    sessions = OpenSessions(*[None] * 8)
    assert sessions.close("none") is False and len(sessions) == 0 and sessions.submitting == 0


def test_a_session_keeps_nothing_of_its_groups_once_they_have_been_delivered():
    session = OpenBatch(BatchSettings(batch_id="s"), "s", submitted_s=0.0)
    session.spans = SimpleNamespace(close_group=lambda *_: None)
    prompts, answers = SimpleNamespace(tokenizer_name="", decode=str), []
    for number in range(3):
        group = PromptGroup(prompt_id=f"p{number}", token_ids=(1, 2, 3), samples=1)
        request = SampleRequest(group=group, index=0, of=1)
        prepared = Prepared(group, (1, 2, 3), 80, "key")
        new = session.plan(prepared, request, [])
        session.take(new, prepared, request, answers.append, 0.0).append(0, part(1), "r")
        session.end(EndSample(sample_id=new.sample_id, end=SampleEnd.STOP, reason="", error=None), 1.0)
        session.answer(new.sample_id, prompts)
        session.emit(new.group.group_id)
    assert [one.group for one in answers] == ["p0", "p1", "p2"]
    assert not any(one for one in vars(session).values() if isinstance(one, dict | set | list))


def test_the_driver_s_prediction_reaches_the_core_with_the_group_s_first_sample():
    told = PromptGroup(**GROUP.model_dump() | {"prediction": {"number": 7, "quality": 0.8}})
    prepared = [Prepared(group, (1, 2, 3), 80, "key") for group in (told, GROUP.model_copy(update={"prompt_id": "q"}))]
    message = RolloutBatch(batch_id="b", groups=tuple(one.group for one in prepared))
    specs = LiveBatch(message, "b", None, prepared, {}, submitted_s=0.0).specs
    assert [spec.prediction for spec in specs] == [Prediction(7.0, 0.8), None]

    session = OpenBatch(BatchSettings(batch_id="s"), "s", submitted_s=0.0)
    request = SampleRequest(group=PromptGroup(prompt_id="p", token_ids=(1, 2, 3), samples=1), index=0)
    assert session.plan(prepared[0], request, []).spec.prediction == Prediction(7.0, 0.8)
