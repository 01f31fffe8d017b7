"""Laws of images in one engine: tokens depend on an image's content alone, KV never crosses images, bad ones end none.

One engine in this process that drafts by n-gram look-up. Chunks of one token verify no drafts: they are the reference.
"""

from base64 import b64decode
from itertools import count

import numpy as np
import pytest
from engine_answers import run
from image_model import IMAGE_ID, IMAGE_TOKENS, encoded, features, item, pixels
from looked_up import drafted, looked_up

from tailrace.app.model import perturbed
from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.features import encoder
from tailrace.deployments.features.prompt_features import PromptFeatures
from tailrace.deployments.features.wire import Features
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.command import LoadWeights, ResetCache
from tailrace.deployments.messages.errors import FeaturesRefused
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

BLOCK, AT, TOKENS = 32, 70, 40
"""The image begins in the prompt's third block of KV."""
PROMPT = np.array([*([7, 30, 7, 41, 9] * 14), *([IMAGE_ID] * IMAGE_TOKENS), *range(11, 41)], np.int32)
NUMBERS = count()
DRAWS = {"random": SamplingParams(ignore_eos=True), "greedy": SamplingParams(temperature=0.0, ignore_eos=True)}


@pytest.fixture(scope="module")
def engine(image_folder):
    sizes = {"max_model_len": 256, "max_running": 8, "kv_cache_gib": 0.05, "block_tokens": BLOCK}
    sizes |= {"max_batched_tokens": 64, "redraw_close_calls": True, "close_call_tolerance": 0.02}
    engine = EngineRunner(EngineConfig(model=str(image_folder), **looked_up(4), **sizes), "images")
    yield engine
    engine.stop()


def of(given: dict | None) -> PromptFeatures | None:
    return None if given is None else PromptFeatures.of(Features.model_validate(given))


def chunk(image: dict | None, done=(), max_tokens: int = TOKENS, draw: str = "random", **changes) -> ChunkRequest:
    values = {
        "chunk_id": f"c{next(NUMBERS)}",
        "sample_key": sample_key(7, 0, "p", 0),
        "token_ids": np.concatenate([PROMPT, np.asarray(done, np.int32)]),
        "prompt_tokens": len(PROMPT),
        "max_tokens": max_tokens,
        "sampling": DRAWS[draw],
        "weights_version": 0,
        "draft": drafted(4),
        "features": of(image),
    }
    return ChunkRequest(**(values | changes))


def in_pieces(engine, image: dict | None, size: int, is_cold: bool = False, draw: str = "random") -> list[int]:
    done: list[int] = []
    while len(done) < TOKENS:
        if is_cold:
            assert engine.ask(ResetCache()).result()
        (result,) = run(engine, chunk(image, done, min(size, TOKENS - len(done)), draw))
        done += result.token_ids.tolist()
    return done


IMAGES = {"first": features((1, AT)), "second": features((2, AT)), "none": None}


@pytest.fixture(scope="module")
def alone(engine) -> dict[tuple[str, str], list[int]]:
    """By image and draw, token by token."""
    return {(name, draw): in_pieces(engine, image, 1, draw=draw) for name, image in IMAGES.items() for draw in DRAWS}


def test_another_image_gives_other_tokens(alone):
    assert len(set(map(tuple, alone.values()))) == len(alone)


@pytest.mark.parametrize("draw", DRAWS)
def test_tokens_depend_neither_on_chunks_nor_on_kv_that_is_found(engine, alone, draw):
    for name in ("first", "second"):
        for size, is_cold in ((TOKENS, False), (13, False), (13, True)):
            assert in_pieces(engine, IMAGES[name], size, is_cold, draw) == alone[name, draw]


def test_tokens_depend_on_no_batch_mate_and_on_no_draft(engine, alone):
    engine.ask(ResetCache()).result()
    asked = list(alone)
    results = run(engine, *(chunk(IMAGES[name], draw=draw) for name, draw in asked))
    for key, result in zip(asked, results, strict=True):
        assert result.token_ids.tolist() == alone[key]
    assert sum(result.drafted_tokens for result in results) > 0
    assert engine.stats().work["redraws"] > 0, "canonical computations have the images, too"


def test_kv_never_crosses_images(engine):
    """The blocks before an image are shared; those with it and after it are the image's own, whatever its hash."""
    engine.ask(ResetCache()).result()
    found = [run(engine, chunk(IMAGES[name]))[0].cached_tokens for name in ("first", "second", "none", "first")]
    assert found == [0, AT // BLOCK * BLOCK, AT // BLOCK * BLOCK, len(PROMPT) // BLOCK * BLOCK]


def test_two_images_are_told_apart_by_their_places(engine):
    prompt = np.concatenate([PROMPT[: AT + IMAGE_TOKENS], PROMPT[AT : AT + IMAGE_TOKENS], PROMPT[-30:]])
    places = AT, AT + IMAGE_TOKENS
    pairs = [features((a, places[0]), (b, places[1])) for a, b in ((1, 2), (2, 1), (1, 1))]
    chunks = [chunk(pair, token_ids=prompt, prompt_tokens=len(prompt)) for pair in pairs]
    once = [result.token_ids.tolist() for result in run(engine, *chunks)]
    assert len(set(map(tuple, once))) == 3
    engine.ask(ResetCache()).result()
    for pair, tokens in zip(pairs, once, strict=True):
        (again,) = run(engine, chunk(pair, token_ids=prompt, prompt_tokens=len(prompt)))
        assert again.token_ids.tolist() == tokens


def test_a_later_turn_tries_its_new_image_alone(engine, monkeypatch):
    tried, refusal = [], encoder._item_refusal
    monkeypatch.setattr(encoder, "_item_refusal", lambda *given: tried.append(given[1].mm_hash) or refusal(*given))
    (first,) = run(engine, chunk(features((11, AT))))
    later = np.concatenate([PROMPT, first.token_ids, PROMPT[AT:]])
    both = features((11, AT), (12, len(PROMPT) + TOKENS))
    for _ in range(2):
        run(engine, chunk(both, token_ids=later, prompt_tokens=len(later), max_tokens=4))
    assert tried == [item.name for item in of(both).items]
    moved = features((11, AT), (12, len(PROMPT) + TOKENS - 1), length=IMAGE_TOKENS + 1)
    (refused,) = run(engine, chunk(moved, token_ids=later, prompt_tokens=len(later), max_tokens=4))
    assert isinstance(refused, FeaturesRefused), "a placeholder of another length is another trial"


def wrong(**changes) -> dict:
    return features((3, AT), kwargs_data={"image": [encoded(item(pixels(3)) | changes)]})


def broken_pixels() -> dict:
    with_nan = pixels(3)
    with_nan[0, 0, 0, 0] = np.nan
    return wrong(pixel_values=item(with_nan)["pixel_values"])


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (features((3, AT), length=IMAGE_TOKENS - 1), "it has 4 embeddings, its placeholder 3 tokens"),
        (wrong(pixel_values=item(np.ones((1, 3, 8), np.float32))["pixel_values"]), "the model does not take them"),
        (wrong(num_patches=item(pixels(3))["pixel_values"]), "the model does not take them"),
        (broken_pixels(), "an embedding is not a number"),
        (features((3, len(PROMPT) - 2)), "a placeholder is not in the prompt"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_and_harms_no_other(engine, alone, image, reason):
    refusal, other = run(engine, chunk(image), chunk(IMAGES["first"]))
    assert isinstance(refusal, FeaturesRefused) and reason in str(refusal) and "\n" not in str(refusal)
    assert other.token_ids.tolist() == alone["first", "random"] and engine.healthy


def test_names_are_content_s_and_the_form_is_vllm_s(engine):
    """Our own encoding is what vLLM's encoder writes; `engine` has loaded vLLM as it wants to be."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item

    from tailrace.deployments.features.vllm_inputs import specs

    first, second = of(IMAGES["first"]), of(IMAGES["second"])
    assert IMAGES["first"]["mm_hashes"] == IMAGES["second"]["mm_hashes"] and first.name != second.name
    (spec,) = specs(first)
    assert spec.mm_hash == spec.identifier == first.items[0].name
    assert b64decode(encode_mm_kwargs_item(spec.data)) == first.items[0].data.content


def test_new_weights_encode_an_image_again(engine, image_folder, tmp_path):
    """An image under another name is encoded anew for certain: metadata that repeat its fields give it one."""
    other = perturbed(image_folder, tmp_path / "other", scale=0.3)
    (before,) = run(engine, chunk(IMAGES["first"]))
    engine.ask(LoadWeights(1, str(other))).result()
    metadata = {"image": [encoded({"num_patches": item(pixels(1))["num_patches"]})]}
    renamed = features((1, AT), mm_metadata=metadata)
    assert of(renamed).name != of(IMAGES["first"]).name
    after, fresh = run(engine, *(chunk(image, weights_version=1) for image in (IMAGES["first"], renamed)))
    assert after.token_ids.tolist() == fresh.token_ids.tolist() != before.token_ids.tolist()
