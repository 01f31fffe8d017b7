"""Images on a service with two replicas, a pool and a gateway: requests, batches and turns have the same tokens."""

import asyncio
import json

import msgspec
import pytest
from gateway_service import caller, gateway
from image_model import IMAGE_ID, IMAGE_TOKENS, encoded, features, make_image_model

from tailrace.app.calls.refused import RolloutRejected
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch

pytestmark = pytest.mark.long

AT = 70
PROMPT = (*([7, 30, 7, 41, 9] * 14), *([IMAGE_ID] * IMAGE_TOKENS), *range(11, 41))
SAMPLES, TOKENS = 4, 48
GROUPS = {"first": features((1, AT)), "second": features((2, AT)), "none": None}
SAMPLING = {"ignore_eos": True}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    make_image_model(folder / "model")
    with gateway(folder / "model", folder, max_body_bytes=1 << 20, tool_parser=None) as found:
        yield found


@pytest.fixture(scope="module")
def batch(seeing) -> dict[tuple[str, int], tuple[int, ...]]:
    """Tokens by group and index."""
    same = {"token_ids": PROMPT, "samples": SAMPLES, "max_tokens": TOKENS, "sampling": SAMPLING}
    groups = [PromptGroup(prompt_id=name, features=given, **same) for name, given in GROUPS.items()]
    results = seeing[1].rollout_blocking(RolloutBatch(batch_id="b", seed=9, groups=groups))
    return {(group.prompt_id, one.sample_index): one.token_ids for group in results for one in group.samples}


def body(given: dict | None, **changes) -> dict:
    sampled = {"max_tokens": TOKENS, "ignore_eos": True}
    return {"token_ids": PROMPT, "features": given, "sampling_params": sampled} | changes


def test_http_has_the_tokens_of_a_batch_whole_and_streamed(seeing, batch):
    assert len(set(batch.values())) == len(GROUPS) * SAMPLES
    with caller(seeing[0], "evaluator") as http:
        for name, given in GROUPS.items():
            headers = {"X-Tailrace-Seed": "9", "X-Tailrace-Group": name, "X-Tailrace-Index": "1"}
            whole = body(given, return_token_ids=True)
            answer = http.post("/inference/v1/generate", json=whole, headers=headers).json()
            assert tuple(answer["choices"][0]["token_ids"]) == batch[name, 1]
            places = {} if given is None else {"mm_placeholders": given["mm_placeholders"]}
            assert {name: answer[name] for name in answer.keys() & {"mm_placeholders"}} == places
            streamed = []
            asked = body(given, stream=True)
            with http.stream("POST", "/inference/v1/generate", json=asked, headers=headers) as events:
                for line in events.iter_lines():
                    if line.startswith("data: {"):
                        streamed += json.loads(line[6:])["choices"][0]["token_ids"]
            assert tuple(streamed) == batch[name, 1]


def test_equal_tokens_with_different_images_have_groups_of_their_own(seeing):
    with caller(seeing[0], "evaluator") as http:
        answers = [http.post("/inference/v1/generate", json=body(given)).json() for given in GROUPS.values()]
    assert len({answer["choices"][0]["tailrace"]["group"] for answer in answers}) == len(GROUPS)


def test_turns_bring_more_images_and_find_their_kv_in_the_pool(seeing):
    client, more = seeing[1], (*range(50, 60), *([IMAGE_ID] * IMAGE_TOKENS), 61, 62)

    async def turns(hold_s: float) -> tuple:
        async with client.open(seed=3) as session:
            given = {"group": "g", "index": 0, "max_tokens": 40, "sampling": SAMPLING}
            first = await session.generate(PROMPT, features=features((1, AT)), turn=0, hold_s=hold_s, **given)
            await client.reset_caches()
            context = (*first.prompt_token_ids, *first.sample.token_ids)
            both = features((1, AT), (2, len(context) + 10))
            second = await session.generate((*context, *more), features=both, turn=1, **given)
            other = features((3, AT), (2, len(context) + 10))
            third = await session.generate((*context, *more), features=other, turn=1, **given)
        return first.sample, second.sample, third.sample

    async def both() -> list[tuple]:
        return [await turns(60.0), await turns(0.0)]

    held, alone = asyncio.run(both())
    assert [one.token_ids for one in held] == [one.token_ids for one in alone]
    assert len({one.token_ids for one in held}) == 3
    assert held[1].cached_tokens >= len(PROMPT) + 40 - 33, "a turn that continues finds all full blocks in the pool"


def test_bad_features_are_refused_at_once(seeing):
    url, client = seeing
    with caller(url, "evaluator") as http:
        item = {"x": {"data": ["float32", [1], msgspec.msgpack.Ext(1, b"a pickle")], "field": ["batched", {}]}}
        pickled = features((1, AT), kwargs_data={"image": [encoded(item)]})
        cases = [(pickled, "extension 1: tensors alone"), (features((1, 200)), "a placeholder ends at 204")]
        for given, reason in [*cases, ({}, "mm_hashes")]:
            answer = http.post("/inference/v1/generate", json=body(given))
            assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
    cut = features((1, AT), kwargs_data={"image": ["@"]})
    with pytest.raises(RolloutRejected, match="it is not base64"):
        client.open(seed=1).generate_blocking(PROMPT, group="g", features=cut)


def test_features_that_the_model_fails_at_end_their_own_samples_alone(seeing):
    url, client = seeing
    short = features((3, AT), length=IMAGE_TOKENS - 1)
    with caller(url, "evaluator") as http:
        for number in range(2 * SAMPLES):
            answer = http.post("/inference/v1/generate", json=body(short), headers={"X-Tailrace-Index": str(number)})
            assert answer.status_code == 500 and "its placeholder 3 tokens" in answer.json()["error"]["message"]
    assert not any(replica.aside for replica in client.status_blocking().replicas), "no replica is to blame"
