"""Close calls are drawn again: with noise in every batch's logits, tokens are those of the canonical computation.

The hook below adds noise to all logits except those of redraws, below the tolerance. It stands for the noise of batch
shapes, which is real but flips a token of this size of test once in a thousand runs.
"""

from dataclasses import replace
from queue import Queue

import numpy as np
import pytest
import torch
from looked_up import drafted, looked_up

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact import sampler
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.policies.protocol.events import ChunkEnd

pytestmark = pytest.mark.live

TOKENS, TOLERANCE = 64, 0.1
NOISE = 0.045
"""Of a logit, either way: a distance between two moves by less than the tolerance."""

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=20),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.95, top_k=50, min_p=0.02),
    SamplingParams(stop_token_ids=tuple(range(0, 8192, 20))),
    SamplingParams(temperature=0.5),
]


@pytest.fixture(autouse=True)
def noise(monkeypatch):
    rng, draw = torch.Generator().manual_seed(5), sampler.ExactSampler.draw

    def noisy(self, logits, batch, owner, positions):
        if batch.states:
            quiet = [bool(state.sampling_params.skip_reading_prefix_cache) for state in batch.states]
            scale = torch.tensor([0.0 if quiet[i] else NOISE for i in owner])[:, None]
            logits = logits + scale * (2 * torch.rand(logits.shape, generator=rng) - 1)
        return draw(self, logits, batch, owner, positions)

    monkeypatch.setattr(sampler.ExactSampler, "draw", noisy)


@pytest.fixture(scope="module")
def config(tiny_model):
    changes = {"close_call_tolerance": TOLERANCE, "redraw_close_calls": True, "draft": DraftConfig(method="off")}
    return EngineConfig(model=str(tiny_model), max_model_len=256, max_running=8, kv_cache_gib=0.05, **changes)


def started(config, name):
    engine = EngineRunner(config, name)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def redrawing(config):
    yield from started(config, "redrawing")


@pytest.fixture(scope="module")
def drafting(config):
    """Its drafts come by look-up, and a step verifies several tokens."""
    yield from started(config.model_copy(update=looked_up(4, shortest=1)), "drafting")


@pytest.fixture(scope="module")
def plain(config):
    yield from started(config.model_copy(update={"redraw_close_calls": False}), "plain")


def chunk(sample, done=(), max_tokens=TOKENS, **changes):
    prompt = np.tile(np.arange(100 + sample, 112 + sample, dtype=np.int32), 3)
    one = ChunkRequest(
        chunk_id=f"{sample}/{len(done)}",
        sample_key=sample_key(7, 0, "p", sample),
        token_ids=np.concatenate([prompt, np.asarray(done, np.int32)]),
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        sampling=SAMPLINGS[sample],
        weights_version=0,
        draft=drafted(4),
    )
    return replace(one, **changes)


def run(engine, *chunks):
    boxes = [Queue() for _ in chunks]
    for one, box in zip(chunks, boxes, strict=True):
        engine.submit(one, box.put)
    results = [box.get(timeout=120) for box in boxes]
    assert not [result for result in results if isinstance(result, Exception)]
    return results


def tokens_of(results):
    return [result.token_ids.tolist() for result in results]


def alone(engine):
    return [run(engine, chunk(sample))[0] for sample in range(len(SAMPLINGS))]


def in_pieces(engine, sample, size):
    done, result = [], None
    while len(done) < TOKENS and (result is None or result.end is not ChunkEnd.STOP):
        (result,) = run(engine, chunk(sample, done, min(size, TOKENS - len(done))))
        done += result.token_ids.tolist()
    return done


def test_noise_changes_tokens_without_redraws_and_none_with_them(plain, redrawing, drafting):
    samples = range(len(SAMPLINGS))
    assert tokens_of(alone(plain)) != tokens_of(run(plain, *map(chunk, samples)))

    expected = alone(redrawing)
    wanted = tokens_of(expected)
    assert tokens_of(run(redrawing, *map(chunk, samples))) == wanted
    assert [in_pieces(redrawing, sample, 16) for sample in samples] == wanted
    drafted = run(drafting, *map(chunk, samples))
    assert tokens_of(drafted) == wanted
    assert sum(result.accepted_tokens for result in drafted) > 0
    assert len({result.end for result in expected}) == 2, "some end by a stop token, others by their length"

    for engine in (redrawing, drafting):
        work = engine.stats().work
        assert work["redraws"] > work["redraws_changed"] > 0 and work["redraw_us"] > 0
    for result in expected:
        assert len(result.logprobs) == len(result.raw_logprobs) == len(result.token_ids)
        assert (result.raw_logprobs < 0).all() and set(result.close_calls) <= set(range(len(result.token_ids)))


def test_engines_count_close_calls_and_margins(plain, redrawing):
    before = plain.stats().work
    results = run(plain, *map(chunk, range(len(SAMPLINGS))))
    counts = {key: count - before[key] for key, count in plain.stats().work.items()}
    assert counts["draws"] == sum(len(result.token_ids) for result in results)
    assert 0 < sum(len(result.close_calls) for result in results) < counts["draws"]
    assert 0 < counts["margins_below.0.01"] <= counts["margins_below.0.0316"] < counts["draws"]
    assert counts["redraws"] == 0


def test_a_replayed_sample_has_no_close_calls(redrawing):
    before = redrawing.stats().work["redraws"]
    (result,) = run(redrawing, chunk(0, max_tokens=20, forced=np.arange(50, 70, dtype=np.int32)))
    assert result.token_ids.tolist() == list(range(50, 70)) and result.close_calls == ()
    assert redrawing.stats().work["redraws"] == before


def test_a_redraw_has_kv_of_its_own(plain, redrawing):
    reserved = plain.stats().kv_capacity_blocks - redrawing.stats().kv_capacity_blocks
    assert reserved * redrawing.stats().block_tokens > redrawing.stats().max_model_len
    assert redrawing.stats().max_running == plain.stats().max_running == 8


def test_kv_without_room_for_a_redraw_is_refused(config):
    with pytest.raises(ValueError, match="raise kv_cache_gib"):
        EngineRunner(config.model_copy(update={"kv_cache_gib": 0.0003}), "full")


def test_chunks_beyond_the_most_that_run_wait_and_leave_a_place_for_redraws(redrawing):
    """A coordinator that has restarted may give chunks before it has ended those of the one before."""
    samples, before = [0, 1, 2, 3] * 3, redrawing.stats().work["redraws"]
    wanted = tokens_of([run(redrawing, chunk(sample))[0] for sample in range(4)])
    many = [chunk(sample, chunk_id=f"{sample}/{place}") for place, sample in enumerate(samples)]
    assert tokens_of(run(redrawing, *many)) == [wanted[sample] for sample in samples]
    assert redrawing.stats().work["redraws"] > before
