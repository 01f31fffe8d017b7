"""vLLM's own drafters beside the group's index: the tokens of an engine without drafts, and drafts that are right.

The models have random weights, whose logits are nearly flat: two of them agree on a token where they share the noise
that draws it, and hardly ever where they do not.
"""

import shutil
from contextlib import contextmanager
from queue import Queue

import numpy as np
import pytest
from drafting_models import save_eagle, save_mtp

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, KvPlan, sample_key
from tailrace.deployments.messages.command import FallAsleep, LoadWeights, ReadWeights, ResetCache, WakeKv
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.lab.benchmarks.engine.second_runner import second_runner
from tailrace.policies.families.drafting import FixedBudget

pytestmark = pytest.mark.live

VOCABULARY = 2048
TOKENS = 24
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20, top_logprobs=2),
    SamplingParams(temperature=1.0, min_p=0.3, repetition_penalty=1.3, bad_words=("the",)),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, ignore_eos=True),
]


@pytest.fixture(scope="module")
def mtp_model(model_dir, tmp_path_factory):
    return save_mtp(model_dir, tmp_path_factory.mktemp("mtp") / "model", VOCABULARY)


@pytest.fixture(scope="module")
def eagle_head(tmp_path_factory):
    return save_eagle(tmp_path_factory.mktemp("eagle") / "head", VOCABULARY)


def config_of(model, drafter: dict | None, method: str = "vllm") -> EngineConfig:
    # Prompts of 60 tokens are computed in two steps; fewer samples run at once than there are.
    sizes = {"max_model_len": 256, "max_running": 3, "max_batched_tokens": 48, "kv_cache_gib": 0.05}
    args = {} if drafter is None else {"speculative_config": drafter}
    draft = DraftConfig(method=method if drafter else "off", draft_tokens=4)
    return EngineConfig(model=str(model), draft=draft, vllm_args=args, **sizes)


@contextmanager
def engine_of(config: EngineConfig, pool=None):
    engine = EngineRunner(config, "engine", pool=pool)
    try:
        yield engine
    finally:
        engine.stop()


def answers_of(engine: EngineRunner, tokens: int = TOKENS, version: int = 0, turn: int = 0) -> list:
    boxes = [Queue() for _ in SAMPLINGS]
    for number, (sampling, box) in enumerate(zip(SAMPLINGS, boxes, strict=True)):
        prompt = np.tile(np.arange(100 + number, 112 + number, dtype=np.int32), 5)
        sample = number + turn * len(SAMPLINGS)
        plan = DraftPlan(GroupRef(f"{version}/g", "g"), sample, 0, tokens, (0, 0), FixedBudget(tokens=4))
        key, shape = sample_key(7, 0, "p", number), (len(prompt), tokens, sampling, version)
        engine.submit(ChunkRequest(f"{sample}/{version}", key, prompt, *shape, draft=plan), box.put)
    found = [box.get(timeout=200) for box in boxes]
    assert not [one for one in found if isinstance(one, Exception)], found
    return found


def results_of(config: EngineConfig, tokens: int = TOKENS) -> tuple[list, object]:
    with engine_of(config) as engine:
        return answers_of(engine, tokens), engine.stats()


def same(found: list, wanted: list) -> None:
    assert [one.token_ids.tolist() for one in found] == [one.token_ids.tolist() for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-4)
        assert (one.end, one.close_calls) == (other.end, other.close_calls)


@pytest.fixture
def drafters(narrow_model, mtp_model, eagle_head):
    """By name: the model, and the settings of its drafter."""
    return {
        "draft_model": (narrow_model, {"method": "draft_model", "model": str(narrow_model)}),
        "mtp": (mtp_model, {"method": "mtp"}),
        "eagle": (narrow_model, {"method": "eagle", "model": str(eagle_head)}),
        "ngram": (narrow_model, {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}),
    }


RIGHT = {"draft_model": 0.7, "mtp": 0.25, "eagle": 0.5, "ngram": 0.5}
"""Least share of right drafts, which keep no rule for tokens. Without the noise the first three have 0.10, 0, 0.08."""

KEPT = []
"""Ended engines, see test_engine_faults_pool.py."""


def check_share(name: str, work: dict) -> None:
    drafted, accepted = work["drafted.vllm"], work["accepted.vllm"]
    assert drafted > 10 and accepted >= RIGHT[name] * drafted, (drafted, accepted)


@pytest.mark.parametrize("name", RIGHT)
def test_tokens_are_those_without_drafts_and_drafts_share_the_noise(drafters, name):
    model, drafter = drafters[name]
    wanted, _ = results_of(config_of(model, None))
    found, stats = results_of(config_of(model, drafter | {"num_speculative_tokens": 2}))
    same(found, wanted)
    check_share(name, stats.work)
    assert stats.methods == ("vllm",)


def test_they_draft_beside_the_groups_index(drafters):
    model, drafter = drafters["draft_model"]
    wanted, _ = results_of(config_of(model, None))
    with engine_of(config_of(model, drafter | {"num_speculative_tokens": 2}, "group")) as engine:
        for turn in range(2):  # the second time the index has the first one's answers
            same(answers_of(engine, turn=turn), wanted)
        work, methods = engine.stats().work, engine.stats().methods
    assert work["accepted.mate"] > 20 and work["accepted.vllm"] > 20
    assert methods == ("group", "history", "ngram", "vllm")


@pytest.mark.parametrize("name", [pytest.param("draft_model", marks=pytest.mark.long), "mtp"])
def test_the_second_runner_carries_them(drafters, name):
    model, drafter = drafters[name]
    wanted, _ = results_of(config_of(model, None), 8)
    config = config_of(model, drafter | {"num_speculative_tokens": 2})
    with second_runner():
        found, stats = results_of(config.model_copy(update={"model_runner": "v2"}), 8)
    same(found, wanted)
    check_share(name, stats.work)


@pytest.fixture(scope="module")
def newer_mtp_model(mtp_model, tmp_path_factory):
    """The same model after training: every matrix has other rows."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("newer") / "model"
    shutil.copytree(mtp_model, folder)
    turned = {name: tensor.flip(0).contiguous() for name, tensor in load_file(mtp_model / "model.safetensors").items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_new_weights_reach_the_layers_that_predict_further(mtp_model, newer_mtp_model, tmp_path):
    from safetensors.torch import load_file, save_file

    drafter = {"method": "mtp", "num_speculative_tokens": 2}
    wanted, fresh = results_of(config_of(newer_mtp_model, drafter))
    without = {n: t for n, t in load_file(newer_mtp_model / "model.safetensors").items() if "mtp" not in n}
    save_file(without, tmp_path / "model.safetensors", {"format": "pt"})
    with engine_of(config_of(mtp_model, drafter)) as engine:
        old = answers_of(engine)
        engine.ask(LoadWeights(1, str(newer_mtp_model))).result(timeout=60)
        before = engine.stats().work["accepted.vllm"]
        same(answers_of(engine, version=1), wanted)
        accepted = engine.stats().work["accepted.vllm"] - before
        assert accepted == pytest.approx(fresh.work["accepted.vllm"], rel=0.1)  # 41; 56 with those before
        assert not [name for name in engine.ask(ReadWeights()).result(timeout=60).checksums if "mtp" in name]
        engine.ask(FallAsleep()).result(timeout=60)
        engine.ask(LoadWeights(2, str(tmp_path))).result(timeout=60)  # of a trainer that does not know these layers
        engine.ask(WakeKv()).result(timeout=60)
        same(answers_of(engine, version=2), wanted)
    assert [one.token_ids.tolist() for one in old] != [one.token_ids.tolist() for one in wanted]


def test_its_kv_moves_with_the_samples(drafters, pool):
    """A chunk that pulls the KV of the one before has that of the drafter too: its first drafts are right."""
    model, drafter = drafters["draft_model"]
    config, pieces, done = config_of(model, drafter | {"num_speculative_tokens": 2}), (40, 40, 20), []
    (wanted,) = answers_of_one(config_of(model, None), None, (sum(pieces),))
    found = answers_of_one(config, pool, pieces)
    for one in found:
        done += one.token_ids.tolist()
        assert one.accepted_tokens >= 0.9 * one.drafted_tokens > 10
    assert done == wanted.token_ids.tolist() and [one.pulled_tokens for one in found] == [0, 96, 128]


def answers_of_one(config: EngineConfig, pool, pieces: tuple[int, ...]) -> list:
    """One sample in chunks of these sizes; the engine's cache is dropped after each."""
    prompt, box, found, done = np.tile(np.arange(103, 115, dtype=np.int32), 5), Queue(), [], []
    with engine_of(config, pool) as engine:
        KEPT.append(engine)
        for size in pieces:
            plan = DraftPlan(GroupRef(f"{len(done)}/g", "g"), 0, 0, sum(pieces), (0, 0), FixedBudget(tokens=4))
            context, sampling = np.array([*prompt, *done], np.int32), SamplingParams(temperature=1.0, ignore_eos=True)
            given = sample_key(7, 0, "p", 3), context, len(prompt), size, sampling, 0
            engine.submit(ChunkRequest(f"{len(done)}", *given, draft=plan, kv=KvPlan(0) if pool else None), box.put)
            found.append(box.get(timeout=60))
            done += found[-1].token_ids.tolist()
            assert engine.ask(ResetCache()).result(timeout=60)
    return found
