"""Routed experts of results: those of the pass that drew the tokens, over chunks, mates, moves, drafts and ends.

One engine in this process, with a pool, which drafts by n-gram look-up; chunks of one token verify no drafts. The truth
is the model's own router, by transformers. Each test is one way by which others have lost routes.
"""

import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from engine_answers import run
from looked_up import drafted, looked_up
from moe_model import CHOSEN, EXPERTS, LAYERS, chosen_experts, make_moe_model

from tailrace.app.trl.route_replay import OWN, padded_routes, replayed_routes
from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.engine.stepper import Stepper
from tailrace.deployments.messages.chunk import ChunkRequest, KvPlan, sample_key
from tailrace.deployments.messages.command import LoadWeights, ReadWeights, ResetCache
from tailrace.deployments.messages.errors import RequestRefused
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.deployments.staging.held import checksum_of
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

KEPT = []
"""Ended engines, see test_engine_faults_pool.py."""

PROMPT = np.array([*([7, 30, 7, 41, 9] * 14), *range(11, 41)], np.int32)
TOKENS, BLOCK = 70, 32
ROUTES = {"enable_return_routed_experts": True}
PHRASES = np.array(([7, 30, 7, 41, 9] * 3 + [55, 60]) * 5, np.int32)[:TOKENS]
"""An answer to replay: look-up drafts its repetitions, and is wrong where a phrase ends."""


@pytest.fixture(scope="module")
def folder(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "model"
    make_moe_model(folder, model_dir)
    return folder


@pytest.fixture(scope="module")
def engine(folder, pool):
    sizes = {"max_model_len": 512, "max_running": 8, "kv_cache_gib": 0.05, "block_tokens": BLOCK}
    sizes |= {"max_batched_tokens": 64, **looked_up(4, **ROUTES)}
    sizes |= {"redraw_close_calls": True, "close_call_tolerance": 0.02}
    engine = EngineRunner(EngineConfig(model=str(folder), **sizes), "experts", pool=pool)
    KEPT.append(engine)
    yield engine
    engine.stop()


NUMBERS = iter(range(1 << 30))


def chunk(done=(), max_tokens: int = TOKENS, routes_from: int = 0, sample: int = 0, **changes) -> ChunkRequest:
    values = {
        "chunk_id": f"c{next(NUMBERS)}",
        "sample_key": sample_key(7, 0, "p", sample),
        "token_ids": np.concatenate([PROMPT, np.asarray(done, np.int32)]),
        "prompt_tokens": len(PROMPT),
        "max_tokens": max_tokens,
        "sampling": SamplingParams(ignore_eos=True),
        "weights_version": 0,
        "draft": drafted(4),
        "kv": KvPlan(0, None, save=False),
        "routes_from": routes_from,
    }
    return ChunkRequest(**values | changes)


def in_pieces(engine, size: int, between=lambda: None, **changes) -> tuple[list[int], np.ndarray, list]:
    """Tokens, routes and results of a sample in chunks of `size` tokens, each with the routes that it lacks."""
    done, routes, results = [], [], []
    while len(done) < TOKENS:
        known = sum(map(len, routes))
        (result,) = run(engine, chunk(done, min(size, TOKENS - len(done)), known, **changes))
        done += result.token_ids.tolist()
        routes.append(result.routed_experts)
        results.append(result)
        between()
    return done, np.concatenate(routes), results


def truth(folder, tokens: list[int]) -> np.ndarray:
    return chosen_experts(folder, [*PROMPT.tolist(), *tokens][:-1])


def assert_routes(found: np.ndarray, wanted: np.ndarray) -> None:
    """The same experts of every token and layer, in whatever order."""
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(np.sort(found, axis=-1), wanted)


def cold(engine) -> None:
    assert engine.ask(ResetCache()).result()


def test_one_chunk_has_the_experts_of_the_prompt_and_of_all_tokens_but_the_last(engine, folder):
    (result,) = run(engine, chunk())
    assert result.routed_experts.shape == (len(PROMPT) + TOKENS - 1, LAYERS, CHOSEN)
    wanted = truth(folder, result.token_ids.tolist())
    assert (
        len(np.unique(wanted[:, 0])) > CHOSEN and not wanted[:, 1].any()
    )  # they depend on the token; one layer has none
    assert_routes(result.routed_experts, wanted)


def test_chunks_add_up_to_the_same(engine, folder):
    tokens, routes, _ = in_pieces(engine, 9)
    assert_routes(routes, truth(folder, tokens))


def test_mates_find_the_prompts_routes_with_its_kv(engine, folder):
    cold(engine)
    first, mate = (run(engine, chunk(sample=sample))[0] for sample in (1, 2))
    assert mate.cached_tokens >= 3 * BLOCK > first.cached_tokens
    assert_routes(mate.routed_experts, truth(folder, mate.token_ids.tolist()))


def test_a_move_pulls_the_routes_with_the_kv(engine, folder):
    """Without the local cache, as on another replica: the routes of the whole context are asked for again."""
    cold(engine)
    (first,) = run(engine, chunk(max_tokens=40, kv=KvPlan(0)))
    cold(engine)
    done = first.token_ids.tolist()
    (second,) = run(engine, chunk(done, TOKENS - 40, kv=KvPlan(0)))
    assert second.pulled_tokens >= 4 * BLOCK
    assert_routes(second.routed_experts, truth(folder, done + second.token_ids.tolist()))


def test_rejected_drafts_leave_no_routes(engine, folder):
    tokens, routes, results = in_pieces(engine, TOKENS, forced=PHRASES)
    single, of_single, _ = in_pieces(engine, 1, forced=PHRASES)
    assert 0 < results[0].accepted_tokens < results[0].drafted_tokens
    assert tokens == single == PHRASES.tolist()
    np.testing.assert_array_equal(routes, of_single)
    assert_routes(routes, truth(folder, tokens))


def test_an_end_among_drafts_leaves_the_rows_of_its_tokens(engine, folder):
    (whole,) = run(engine, chunk(forced=PHRASES))
    stop = SamplingParams(stop_token_ids=(PHRASES[32],))
    (stopped,) = run(engine, chunk(forced=PHRASES, sampling=stop))
    count = len(stopped.token_ids)
    assert count == PHRASES.tolist().index(PHRASES[32]) + 1 and stopped.accepted_tokens > 0
    np.testing.assert_array_equal(stopped.routed_experts, whole.routed_experts[: len(PROMPT) + count - 1])


def mismatch(model, results, routes) -> float:
    """Returns the mean distance of a trainer's logprobs from the rollout's, in nats."""
    token_ids = torch.tensor([[*PROMPT.tolist(), *result.token_ids.tolist()] for result in results])
    with torch.no_grad(), replayed_routes(model, routes) if routes is not None else nullcontext():
        logprobs = model(token_ids).logits[:, :-1].float().log_softmax(-1)
    own = logprobs.gather(2, token_ids[:, 1:, None])[:, -TOKENS:, 0]
    return float((own - torch.tensor(np.array([result.raw_logprobs for result in results]))).abs().mean())


def test_a_trainer_that_replays_them_is_nearer_to_the_rollout(engine, folder):
    """The trainer computes in bfloat16, so that some of its routers choose otherwise."""
    from transformers import Qwen3MoeForCausalLM

    results = run(engine, *(chunk(sample=sample) for sample in range(4)))
    found = [RoutedExperts(result.routed_experts) for result in results]
    routes = padded_routes(found, [0] * 4, len(PROMPT) + TOKENS)
    exact = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert mismatch(exact, results, routes) < 1e-3  # experts and their gates are those of the engine
    other = torch.where(routes == OWN, OWN, (routes + 1) % EXPERTS)
    assert mismatch(exact, results, other) > 10 * mismatch(exact, results, routes)
    rough = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert mismatch(rough, results, routes) < 0.8 * mismatch(rough, results, None)


def test_experts_are_those_of_an_update(engine, folder, tmp_path):
    """vLLM 0.32 repacks them at the first load alone: those of an update were multiplied as if they were repacked."""
    from safetensors.torch import load_file, save_file

    (before,) = run(engine, chunk())
    engine.ask(LoadWeights(1, str(folder))).result(60)
    (again,) = run(engine, chunk(weights_version=1))
    assert again.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_array_equal(again.raw_logprobs, before.raw_logprobs)
    np.testing.assert_array_equal(again.routed_experts, before.routed_experts)
    held = engine.ask(ReadWeights()).result(60)
    assert held.unlike == () and held.problem == ""
    changed = load_file(folder / "model.safetensors")
    assert held.checksums == {name: checksum_of(name, value) for name, value in changed.items()}
    other = {name: value * 1.5 if ".experts." in name else value for name, value in changed.items()}
    save_file(other, tmp_path / "model.safetensors", {"format": "pt"})
    engine.ask(LoadWeights(2, str(tmp_path))).result(60)
    (moved,) = run(engine, chunk(weights_version=2, forced=before.token_ids))
    engine.ask(LoadWeights(0, str(folder))).result(60)
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert mismatch(model, [moved], None) > 0.01
    for path in folder.glob("*.json"):
        shutil.copy(path, tmp_path)
    assert mismatch(Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), [moved], None) < 1e-3


@pytest.mark.parametrize("routes_from", [-1, 1.5, len(PROMPT) + 1, None])
def test_rows_from_nowhere_are_refused_and_the_engine_lives(engine, routes_from):
    refused, healthy = run(engine, chunk(routes_from=routes_from), chunk(max_tokens=4))
    assert isinstance(refused, RequestRefused) and len(healthy.token_ids) == 4


def test_json_has_them_as_vllm_has():
    routes = RoutedExperts(np.arange(12, dtype=np.uint8).reshape(2, 3, 2))
    assert RoutedExperts.of(routes.base64()) == routes


def test_a_model_without_experts_is_refused_in_one_line(tiny_model):
    config = EngineConfig(model=str(tiny_model), max_model_len=256, max_running=2, kv_cache_gib=0.05, vllm_args=ROUTES)
    with pytest.raises(ValueError, match="enable_return_routed_experts: the model has no experts; remove it"):
        Stepper(config, "dense", 0, 0)
