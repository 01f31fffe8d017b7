"""Messages of a line come back as they were sent; anything else is refused in one line."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import astuple
from performances import performance

from tailrace.deployments.channel import frames
from tailrace.deployments.channel.codec import Codec
from tailrace.deployments.channel.frames import Abort, BadFrame, Cause, ChunkEnded, ChunkFailure, Pulse, Report, Start
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats, KvPlan
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan, DraftReport
from tailrace.deployments.messages.rollout import PromptLogprobs
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.policies.families.goodput import Goodput
from tailrace.policies.families.registry import members
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.events import ChunkEnd
from tailrace.policies.protocol.performance import MethodAcceptance

TOKENS = np.arange(700, dtype=np.int32)
LOGPROBS = np.linspace(-9, 0, 5, dtype=np.float32)
PLAN = DraftPlan(GroupRef("b/p", "key"), 3, 1, 900, (100, 500), Goodput(), DraftMode(16, True), "group", None)
CHUNK = ChunkRequest(
    chunk_id="b/p#3/1", sample_key=2**64 - 1, token_ids=TOKENS, prompt_tokens=200, max_tokens=64,
    sampling=SamplingParams(temperature=0.7, stop=("END",), logit_bias={5: -1.5}), weights_version=4,
    weights_digest="ab", kv=KvPlan(4, None, True, "ab", True), draft=PLAN, forced=TOKENS[:9],
    traceparent="00-1-2-01", keep_trace=True, turn_start=210, adapter=Adapter("poet", 2, "0" * 16, "/adapters/poet"),
)  # fmt: skip
RESULT = ChunkResult(
    chunk_id="b/p#3/1", token_ids=TOKENS[:5], logprobs=LOGPROBS, raw_logprobs=LOGPROBS - 1, end=ChunkEnd.LENGTH,
    weights_version=4, queue_s=0.1, prefill_s=0.2, decode_s=0.3, cached_tokens=7, computed_tokens=8, kv_names=b"\0\1",
    drafts=DraftReport.none(4), close_calls=(2,), top_logprobs=(((1, -0.5), (2, float("-inf"))),) * 5,
    sampling_mask=((1, 2),) * 5, prompt_logprobs=PromptLogprobs(logprobs=(-1.0,), ranks=(3,)),
    routed_experts=np.arange(5 * 3 * 2, dtype=np.uint16).reshape(5, 3, 2),
)  # fmt: skip
NO_ROWS = ChunkEnded("b/p#3/1", replace(RESULT, routed_experts=np.empty((0, 3, 2), np.uint8)))
PERFORMANCE = performance(
    900.0,
    acceptance=(MethodAcceptance("group", 3.5, 6.0, 0.2),),
    drafter_samples=(1.0, 4.0),
    drafter_seconds=(0.1, 0.2),
)
STATS = EngineStats(
    replica_id="r1", weights_version=4, block_tokens=32, kv_capacity_blocks=100, max_running=8, max_model_len=512,
    draft_tokens=4, observed_at=50.0, running={"b/p#3/1": 6}, methods=("group",), cores=(0,),
    performance=PERFORMANCE, work={"steps": np.int64(7)},
    adapters=(Adapter("poet", 2, "0" * 16, "/adapters/poet"),), kv_counts={"hit.local": 3},
)  # fmt: skip


def same(one, other) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if type(one) in (ChunkRequest, ChunkResult, EngineStats, DraftReport):
        pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
        return type(one) is type(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(
    "message",
    [
        Start(CHUNK), Start(replace(CHUNK, draft=None, kv=None, forced=None, adapter=None)), Abort("b/p#3/1", True),
        Pulse(0.5), ChunkEnded("b/p#3/1", RESULT), NO_ROWS, ChunkFailure("b/p#3/1", Cause.DOWN, "a step failed"),
        Report(3.5, STATS),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_comes_back_as_it_was(message):
    back = frames.decode(frames.encode(message))
    assert type(back) is type(message) and same(astuple(message), astuple(back))


@pytest.mark.parametrize("payload", [b"", b"\x06", b"\xff", msgpack.encode(["Other", "c"]), msgpack.encode([])])
def test_an_unknown_kind_is_refused_in_one_line(payload):
    with pytest.raises(BadFrame, match=r"^not a message of a line: .+$") as caught:
        frames.decode(payload)
    assert caught.value.chunk_id == ""


def test_a_line_carries_each_of_our_drafting_policies_and_no_other():
    class Own(Goodput):
        pass

    for kind in members("drafting").values():
        chunk = replace(CHUNK, draft=replace(PLAN, policy=kind()))
        assert frames.carries(chunk) and frames.decode(frames.encode(Start(chunk))).chunk.draft.policy == kind()
    assert not frames.carries(replace(CHUNK, draft=replace(PLAN, policy=Own())))
    assert not frames.carries(replace(CHUNK, features=object()))


def test_the_end_that_cannot_be_read_names_its_chunk():
    for odd in (None, "not a result", {"chunk_id": "b/p#3/1"}):
        with pytest.raises(BadFrame) as caught:
            frames.decode(frames.encode(ChunkEnded("b/p#3/1", odd)))
        assert caught.value.chunk_id == "b/p#3/1" and "\n" not in str(caught.value)


def test_numbers_of_numpy_and_whole_floats_are_taken_where_an_int_is_promised():
    stats = replace(STATS, max_running=np.int32(8), kv_capacity_blocks=100.0, work={"steps": np.float64(7.0)})
    back = frames.decode(frames.encode(Report(3, stats)))
    assert back.sent_s == 3.0 and back.stats.work == {"steps": 7} and type(back.stats.work["steps"]) is int
    assert (back.stats.max_running, back.stats.kv_capacity_blocks) == (8, 100)
    ended = frames.decode(frames.encode(ChunkEnded("c", replace(RESULT, cached_tokens=7.0))))
    assert type(ended.result.cached_tokens) is int


@given(
    st.integers(0, 4000),
    st.integers(0, 255),
    st.sampled_from([Start(CHUNK), ChunkEnded("c", RESULT), Report(1, STATS)]),
)
def test_a_changed_byte_is_refused_or_gives_a_message(place, byte, message):
    payload = bytearray(frames.encode(message))
    payload[place % len(payload)] = byte
    with_cut = payload[: place % len(payload)]
    for one in (bytes(payload), bytes(with_cut)):
        try:
            assert isinstance(frames.decode(one), frames.Message)
        except BadFrame as refusal:
            assert "\n" not in str(refusal)


def test_a_value_of_no_known_type_is_carried_neither_way():
    with pytest.raises(TypeError, match=r"^object is not carried by a socket$"):
        frames.encode(Start(object()))
    kind = Codec(complex)
    with pytest.raises(TypeError, match=r"^complex is not carried by a socket$"):
        kind.encode(1j)
    with pytest.raises(ValueError, match="complex is not carried by a socket"):
        kind.decode(msgpack.encode([0.0, 1.0]))
