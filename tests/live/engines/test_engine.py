"""Laws of one engine: a sample's tokens depend on nothing but the sample; no chunk is lost, none harms another.

Two engines in this process: `roomy`, plain, with KV for everybody; `cramped`, which drafts by n-gram look-up
and has so little KV that vLLM must preempt.
"""

from queue import Queue

import numpy as np
import pytest
from engine_answers import ANSWER_S, held, run
from looked_up import drafted, looked_up
from waiting import until

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.command import ResetCache
from tailrace.deployments.messages.errors import EngineDown
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.policies.protocol.events import ChunkEnd

pytestmark = pytest.mark.live

TOKENS = 48
LONG = 200
"""Tokens of a chunk that is to be aborted."""

WORDS = np.array([504, 2365, 355, 260, 4052, 314, 253, 1568, 282, 260, 1004, 28], np.int32)
SAMPLINGS = [
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for temperature, top_p, top_k, min_p in [
        (1.0, 1.0, 0, 0.0),
        (0.8, 0.9, 0, 0.0),
        (1.2, 1.0, 20, 0.0),
        (1.0, 1.0, 0, 0.1),
        (0.0, 1.0, 0, 0.0),
        (0.5, 1.0, 0, 0.0),
        (0.9, 0.95, 50, 0.02),
        (1.0, 1.0, 0, 0.0),
    ]
]
SAMPLES = range(len(SAMPLINGS))


def prompt(sample: int) -> np.ndarray:
    """36 tokens that repeat themselves, so that look-up finds drafts and some are right."""
    return np.tile(np.roll(WORDS, sample), 3)


def chunk(sample: int, done=(), max_tokens=TOKENS, **changes) -> ChunkRequest:
    start = changes.pop("prompt", prompt(sample))
    values = {
        "chunk_id": f"{sample}/{len(done)}",
        "sample_key": sample_key(7, 0, "p", sample),
        "token_ids": np.concatenate([start, np.asarray(done, np.int32)]),
        "prompt_tokens": len(start),
        "max_tokens": max_tokens,
        "sampling": SAMPLINGS[sample],
        "weights_version": 0,
        "draft": drafted(4),
    }
    return ChunkRequest(**(values | changes))


def in_pieces(engine, sample, size):
    """The sample in chunks of `size` tokens: (token ids, logprobs, raw logprobs)."""
    parts = [np.empty(0, np.int32)], [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    while (done := np.concatenate(parts[0])).size < TOKENS:
        (result,) = run(engine, chunk(sample, done, min(size, TOKENS - done.size)))
        for part, new in zip(parts, (result.token_ids, result.logprobs, result.raw_logprobs), strict=True):
            part.append(new)
        if result.end is ChunkEnd.STOP:
            break
    return tuple(np.concatenate(part) for part in parts)


def assert_same(got, expected):
    tokens, logprobs, raw_logprobs = got
    np.testing.assert_array_equal(tokens, expected.token_ids)
    np.testing.assert_allclose(logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_allclose(raw_logprobs, expected.raw_logprobs, atol=1e-4)


def arrays(result):
    return result.token_ids, result.logprobs, result.raw_logprobs


@pytest.fixture(scope="module")
def config(tiny_model):
    return EngineConfig(model=str(tiny_model), max_model_len=256, max_running=8, kv_cache_gib=0.05)


@pytest.fixture(scope="module")
def roomy(config):
    engine = EngineRunner(config, "roomy")
    yield engine
    assert engine.stats().preemptions == 0, "every chunk's reservation fitted (law 5)"
    engine.stop()


@pytest.fixture(scope="module")
def cramped(config):
    drafting = {**looked_up(4), "kv_cache_gib": 0.00045}  # 14 blocks
    engine = EngineRunner(config.model_copy(update=drafting), "cramped")
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def alone(roomy):
    """Every sample whole and by itself: what all else is compared with."""
    return [run(roomy, chunk(sample))[0] for sample in SAMPLES]


def test_samples_differ(alone):
    assert len({result.token_ids.tobytes() for result in alone}) == len(SAMPLES)


def test_logprobs_are_of_their_distribution(alone):
    for result, sampling in zip(alone, SAMPLINGS, strict=True):
        assert len(result.token_ids) == len(result.logprobs) == len(result.raw_logprobs) <= TOKENS
        assert (result.raw_logprobs <= 0).all() and (result.logprobs <= 0).all()
        if sampling == SamplingParams():
            np.testing.assert_allclose(result.logprobs, result.raw_logprobs, atol=1e-5)
        if sampling.temperature == 0:
            assert not result.logprobs.any()


def test_batch_mates_change_nothing(roomy, alone):
    for got, expected in zip(run(roomy, *map(chunk, SAMPLES)), alone, strict=True):
        assert_same(arrays(got), expected)


@pytest.mark.parametrize("sample", SAMPLES[:3])
def test_chunk_size_changes_nothing(roomy, alone, sample):
    assert_same(in_pieces(roomy, sample, 16), alone[sample])


def test_drafts_and_preemptions_change_nothing(cramped, alone):
    boxes = [Queue() for _ in SAMPLES]
    with held(cramped):  # together they have more KV than there is
        for sample, box in zip(SAMPLES, boxes, strict=True):
            cramped.submit(chunk(sample), box.put)
    results = [box.get(timeout=ANSWER_S) for box in boxes]
    for got, expected in zip(results, alone, strict=True):
        assert_same(arrays(got), expected)
    assert sum(result.drafted_tokens for result in results) > sum(result.accepted_tokens for result in results) > 0
    assert cramped.stats().preemptions > 0, "the other engine's 0 is a count, not a constant"
    assert cramped.stats().draft_tokens == 4


def test_chunk_size_changes_nothing_with_drafts(cramped, alone):
    assert_same(in_pieces(cramped, 4, 16), alone[4])


def test_a_context_seen_before_is_found_in_the_cache(roomy, alone):
    (result,) = run(roomy, chunk(0, alone[0].token_ids[:40]))
    block = roomy.stats().block_tokens
    assert result.cached_tokens > 0 and result.cached_tokens % block == 0
    assert result.cached_tokens + result.computed_tokens == len(prompt(0)) + 40
    assert roomy.ask(ResetCache()).result(timeout=60)
    (again,) = run(roomy, chunk(0, alone[0].token_ids[:40]))
    assert again.cached_tokens == 0
    np.testing.assert_array_equal(again.token_ids, result.token_ids)


def test_an_abort_keeps_the_tokens_so_far(roomy, alone):
    (sample,) = [sample for sample in SAMPLES if alone[sample].end is ChunkEnd.LENGTH][:1]
    box = Queue()
    with held(roomy, lambda: roomy._stepper.stats().running.get("aborted", 0) >= 4) as waits:
        roomy.submit(chunk(sample, chunk_id="aborted", max_tokens=LONG), box.put)
        assert waits.wait(ANSWER_S)
        roomy.abort("aborted")
    result = box.get(timeout=ANSWER_S)
    assert result.end is ChunkEnd.ABORTED and 4 <= len(result.token_ids) < LONG
    count = min(TOKENS, len(result.token_ids))
    np.testing.assert_array_equal(result.token_ids[:count], alone[sample].token_ids[:count])
    np.testing.assert_allclose(result.logprobs[:count], alone[sample].logprobs[:count], atol=1e-4)


def test_an_abort_before_the_first_token_and_of_nobody(roomy):
    roomy.abort("nobody")
    box, other = Queue(), Queue()
    with held(roomy) as waits:
        roomy.submit(chunk(1), other.put)
        assert waits.wait(ANSWER_S)
        roomy.submit(chunk(0, chunk_id="early"), box.put)
        roomy.abort("early")
    result = box.get(timeout=ANSWER_S)
    assert result.end is ChunkEnd.ABORTED and len(result.logprobs) == len(result.token_ids) == 0
    assert other.get(timeout=ANSWER_S).end is not ChunkEnd.ABORTED


@pytest.mark.parametrize("engine_name", ["roomy", "cramped"])
def test_forced_tokens_are_emitted_then_end_of_sequence(engine_name, request):
    engine = request.getfixturevalue(engine_name)
    forced = np.tile(WORDS, 2)[:20]
    (result,) = run(engine, chunk(0, forced=forced))
    assert result.end is ChunkEnd.STOP
    np.testing.assert_array_equal(result.token_ids[:-1], forced)
    assert len(result.token_ids) == 21 and (result.raw_logprobs < 0).all()
    (rest,) = run(engine, chunk(0, forced[:15], forced=forced))
    np.testing.assert_array_equal(rest.token_ids, result.token_ids[15:])


def test_a_stop_token_ends_a_sample(roomy, alone):
    stop = int(alone[0].token_ids[10])
    first = alone[0].token_ids.tolist().index(stop)
    sampling = SamplingParams(stop_token_ids=(stop,))
    (result,) = run(roomy, chunk(0, sampling=sampling))
    assert result.end is ChunkEnd.STOP
    np.testing.assert_array_equal(result.token_ids, alone[0].token_ids[: first + 1])


def test_the_context_ends_a_sample(roomy):
    long = np.resize(WORDS, 250)
    (result,) = run(roomy, chunk(0, prompt=long, forced=np.resize(WORDS, 100)))
    assert (result.end, len(result.token_ids)) == (ChunkEnd.LENGTH, 6)


REFUSED = {
    "too long": ({"prompt": np.resize(WORDS, 256)}, "max_model_len is 256"),
    "empty": ({"prompt": np.empty(0, np.int32)}, "context of 0 tokens"),
    "other weights": ({"weights_version": 1}, "wants weights version 1, this is 0"),
    "no such token": ({"prompt": np.array([10**6], np.int32)}, "outside the vocabulary"),
    "no such forced token": ({"forced": np.array([10**6], np.int32)}, "outside the vocabulary"),
    "no tokens": ({"max_tokens": 0}, "max_tokens is 0"),
    "twice": ({"chunk_id": "1/0"}, "already running"),
    "no numbers": ({"forced": np.array(["a", "b"])}, "forced is no array of whole numbers"),
    "no array": ({"token_ids": "ab"}, "token_ids is no array of whole numbers"),
    "no sampling": ({"sampling": "x"}, "sampling is a str, not SamplingParams"),
    "no adapter": ({"adapter": []}, "adapter is a list, not Adapter"),
    "no features": ({"features": "x"}, "features is a str, not PromptFeatures"),
    "no plan of KV": ({"kv": 1}, "kv is a int, not KvPlan"),
    "no plan of drafts": ({"draft": {}}, "draft is a dict, not DraftPlan"),
}


def test_a_bad_chunk_fails_alone(roomy, alone):
    bad = [chunk(0, **({"chunk_id": name} | changes)) for name, (changes, _) in REFUSED.items()]
    good, *refused = run(roomy, chunk(1), *bad)
    assert_same(arrays(good), alone[1])
    for error, (_, words) in zip(refused, REFUSED.values(), strict=True):
        assert isinstance(error, ValueError) and words in str(error) and "\n" not in str(error)
    assert roomy.healthy
    until(lambda: roomy.stats().running == {})  # a snapshot is taken after the results have gone out


def test_a_failed_step_fails_every_chunk_and_the_engine(cramped):
    def explode():
        raise ArithmeticError("a bit flipped")

    cramped._stepper.step = explode
    for error in run(cramped, chunk(0), chunk(1)) + run(cramped, chunk(2)):
        assert isinstance(error, EngineDown) and "a bit flipped" in str(error)
    assert not cramped.healthy
