"""Images on a service with two replicas, a pool and a gateway: requests, batches and turns have the same tokens."""

import asyncio
import json

import anthropic
import msgspec
import openai
import pytest
from gateway_service import TOKENS as KEYS
from gateway_service import caller, gateway
from image_model import IMAGE_ID, IMAGE_TOKENS, encoded, features, make_image_model, picture

from tailrace.app.calls.refused import RolloutRejected
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.http import Client

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
            assert answer.status_code == 400 and "its placeholder 3 tokens" in answer.json()["error"]["message"]
    assert not any(replica.aside for replica in client.status_blocking().replicas), "no replica is to blame"


# ---- chats, and trajectories in every dialect --------------------------------------------------------


def as_chat(part: int | str) -> dict:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": picture(part)}}


def as_message(part: int | str) -> dict:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = picture(part).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def as_item(part: int | str) -> dict:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    return {"type": "input_image", "image_url": picture(part), "detail": "auto"}


def by_chats(base: dict, turns: list[list], streams: bool) -> None:
    client, messages = openai.OpenAI(**base), []
    for parts in turns:
        messages.append({"role": "user", "content": [as_chat(part) for part in parts]})
        asked = {"model": "any", "messages": messages, "max_tokens": ANSWER}
        if streams:
            chunks = client.chat.completions.create(stream=True, **asked)
            said = "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices)
        else:
            said = client.chat.completions.create(**asked).choices[0].message.content
        messages.append({"role": "assistant", "content": said})


def by_messages(base: dict, turns: list[list], streams: bool) -> None:
    client, messages = anthropic.Anthropic(**base), []
    for parts in turns:
        messages.append({"role": "user", "content": [as_message(part) for part in parts]})
        counted = client.messages.count_tokens(model="any", messages=messages).input_tokens
        asked = {"model": "any", "messages": messages, "max_tokens": ANSWER}
        if streams:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        assert answer.usage.input_tokens == counted
        messages.append({"role": "assistant", "content": answer.content})


def by_responses(base: dict, turns: list[list], streams: bool) -> None:
    client, previous = openai.OpenAI(**base), None
    for parts in turns:
        items = [{"role": "user", "content": [as_item(part) for part in parts]}]
        asked = {"model": "any", "input": items, "max_output_tokens": ANSWER}
        asked |= {} if previous is None else {"previous_response_id": previous}
        if streams:
            *_, last = client.responses.create(stream=True, **asked)
            previous = last.response.id
        else:
            previous = client.responses.create(**asked).id


ANSWER = 16
TURNS = [[1, "What?"], ["And here?", 2]]


@pytest.fixture(scope="module")
def tailrace(seeing):
    client = Client(seeing[0], KEYS["evaluator"])
    yield client
    client.close()


def played(tailrace, dialect, turns: list[list], streams: bool = False):
    """The rows of one trajectory, which has these names in all tests."""
    trajectory = tailrace.trajectory_blocking(group="see", index=1, seed=6)
    dialect({"base_url": trajectory.base_url, "api_key": trajectory.api_key}, turns, streams)
    return trajectory.reward_blocking(0.5)


@pytest.fixture(scope="module")
def row(tailrace):
    found = played(tailrace, by_chats, TURNS)
    assert found.turns == 2 and found.branches == found.reencoded_tokens == 0
    (row,) = found.rows
    return row


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dialect", [by_chats, by_messages, by_responses])
def test_every_dialect_has_the_same_row_with_its_images(tailrace, row, dialect, streams):
    found = played(tailrace, dialect, TURNS, streams)
    assert found.rows == (row,) and found.reencoded_tokens == 0
    places = row.features.mm_placeholders["image"]
    assert [row.token_ids[one.offset : one.offset + one.length] for one in places] == [(IMAGE_ID,) * IMAGE_TOKENS] * 2
    assert row.turns[0].end <= places[1].offset < row.turns[1].start


def test_a_row_s_turns_are_sampled_again_by_generate_with_its_features(seeing, row):
    with caller(seeing[0], "evaluator") as http:
        for number, turn in enumerate(row.turns):
            features = row.features.model_dump(mode="json", exclude_none=True)
            for of in (features["mm_hashes"], features["mm_placeholders"], features["kwargs_data"]):
                of["image"] = of["image"][: number + 1]
            sampled = {"max_tokens": turn.end - turn.start, "logprobs": 1}
            asked = {"token_ids": row.token_ids[: turn.start], "features": features, "sampling_params": sampled}
            names = {"Seed": "6", "Group": "see", "Index": "1", "Turn": str(number)}
            headers = {f"X-Tailrace-{name}": value for name, value in names.items()}
            (choice,) = http.post("/inference/v1/generate", json=asked, headers=headers).json()["choices"]
            assert tuple(choice["token_ids"]) == row.token_ids[turn.start : turn.end]
            logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
            assert logprobs == pytest.approx(row.logprobs[turn.start : turn.end], abs=1e-4)


def test_a_whole_row_is_scored_with_the_logprobs_that_it_has(seeing, row):
    asked = {"token_ids": row.token_ids, "features": row.features.model_dump(mode="json", exclude_none=True)}
    with caller(seeing[0], "evaluator") as http:
        scored = http.post(
            "/inference/v1/generate", json=asked | {"sampling_params": {"prompt_logprobs": 0, "max_tokens": 1}}
        )
    found = [next(iter(one.values()))["logprob"] for one in scored.json()["prompt_logprobs"][1:]]
    pairs = [(a, b) for a, b, is_sampled in zip(found, row.logprobs[1:], row.mask[1:], strict=True) if is_sampled]
    assert len(pairs) == sum(row.mask)
    assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], abs=1e-3)


def test_another_image_of_one_size_is_a_branch_with_other_tokens(tailrace, row):
    trajectory = tailrace.trajectory_blocking(group="see", index=1, seed=6)
    base = {"base_url": trajectory.base_url, "api_key": trajectory.api_key}
    by_chats(base, TURNS, False)
    by_chats(base, [[3, "What?"]], False)
    found = trajectory.reward_blocking(0.5)
    first, second = found.rows
    assert first == row and found.branches == 1
    prompt = second.turns[0].start
    assert prompt == row.turns[0].start and second.token_ids[:prompt] == row.token_ids[:prompt], "equal token ids"
    assert second.features.mm_hashes["image"][0] != row.features.mm_hashes["image"][0]
    assert second.token_ids[prompt:] != row.token_ids[prompt : row.turns[0].end], "under the same names"


def test_ordinary_chats_see_images_and_go_on_from_their_turns(seeing):
    with caller(seeing[0], "evaluator") as http:

        def chat(*messages) -> dict:
            asked = {"messages": messages, "max_tokens": ANSWER, "temperature": 0.0, "return_token_ids": True}
            answer = http.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def user(*parts) -> dict:
            return {"role": "user", "content": [as_chat(part) for part in parts]}

        first, other = chat(user(1, "What?")), chat(user(2, "What?"))
        assert first["prompt_token_ids"] == other["prompt_token_ids"]
        assert first["choices"][0]["token_ids"] != other["choices"][0]["token_ids"]
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        later = chat(user(1, "What?"), said, user("And here?", 2))
        context = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
        assert later["prompt_token_ids"][: len(context)] == context


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "not fetched from an address"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "its file is none of"),
    ],
)
def test_images_that_are_none_are_refused_in_one_line(seeing, part, reason):
    with caller(seeing[0], "evaluator") as http:
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
