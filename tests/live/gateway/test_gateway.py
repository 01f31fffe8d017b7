"""The gateway of a service: real clients over HTTP, and the tokens that a batch has."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import openai
import pytest
from gateway_service import PROMPT, TOKENS, asked, caller
from image_model import features
from waiting import until

from tailrace.app.model import perturbed
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch, SamplingParams
from tailrace.http import Client
from tailrace.lab.verification.disturbances import kill_actors

OPEN = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
    "additionalProperties": False,
}
IMAGE = features((1, 0), length=1, kwargs_data={"image": ["AAAA"]})
TOOLS = [{"type": "function", "function": {"name": "door", "parameters": OPEN, "strict": True}}]


def test_requests_of_three_clients_have_the_tokens_of_a_batch(address):
    url, client = address
    group = PromptGroup(prompt_id="g", token_ids=PROMPT, samples=12, max_tokens=24)
    (expected,) = client.rollout_blocking(RolloutBatch(batch_id="whole", groups=(group,), seed=9))
    indexes = list(range(12))
    Random(3).shuffle(indexes)
    with ThreadPoolExecutor(12) as pool:
        clients = [caller(url, "evaluator") for _ in range(3)]
        found = dict(zip(indexes, pool.map(lambda n: asked(clients[n % 3], n)["choices"][0], indexes), strict=True))
    for sample in expected.samples:
        choice = found[sample.sample_index]
        assert tuple(choice["token_ids"]) == sample.token_ids
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(sample.logprobs, abs=1e-4)
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(sample.token_ids)}]
    assert found[3]["tailrace"] | {"weights_digests": {}} == {
        "seed": 9, "step": 0, "group": "g", "index": 3, "turn": 0, "weights_digests": {},
    }  # fmt: skip


def test_openai_s_own_client_gets_completions_and_chats(address):
    url, _ = address
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKENS["evaluator"])
    (model,) = client.models.list().data
    settings = {"model": model.id, "max_tokens": 12, "seed": 4}
    one, same = (client.completions.create(prompt="Once upon", n=2, logprobs=1, **settings) for _ in range(2))
    assert [choice.text for choice in one.choices] == [choice.text for choice in same.choices]
    assert one.choices[0].text != one.choices[1].text
    assert one.usage.completion_tokens == 24 and len(one.choices[0].logprobs.token_logprobs) == 12
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], logprobs=True, **settings)
    (choice,) = chat.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert len(choice.logprobs.content) == 12
    with pytest.raises(openai.NotFoundError, match="The model `gpt-9` does not exist"):
        client.completions.create(model="gpt-9", prompt="Hello")
    with pytest.raises(openai.AuthenticationError, match="give one of the gateway's tokens"):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()


@pytest.fixture(scope="module")
def openai_client(address):
    return openai.OpenAI(base_url=f"{address[0]}/v1", api_key=TOKENS["evaluator"])


@pytest.fixture(scope="module")
def no_white_space(tiny_model) -> dict[str, int]:
    """Biases without which random weights fill JSON with line breaks."""
    vocabulary = json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"]
    return {str(token): -100 for text, token in vocabulary.items() if not set(text) - set("ĠĊĉč")}


def test_openai_s_own_client_gets_streams(openai_client):
    settings = {"model": openai_client.models.list().data[0].id, "max_tokens": 80, "seed": 4, "n": 2, "prompt": "Once"}
    whole = openai_client.completions.create(**settings)
    chunks = list(openai_client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage and len(chunks) > 4
    for expected in whole.choices:
        pieces = [one for chunk in chunks for one in chunk.choices if one.index == expected.index]
        assert "".join(piece.text for piece in pieces) == expected.text
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [expected.finish_reason]


def test_openai_s_own_client_chats_with_tools_over_three_turns(openai_client, no_white_space):
    settings = {"model": openai_client.models.list().data[0].id, "max_tokens": 100, "seed": 4, "tools": TOOLS}
    settings |= {"extra_body": {"return_token_ids": True}, "logit_bias": no_white_space}
    create = openai_client.chat.completions.create
    messages: list = [{"role": "user", "content": "Is it open?"}]
    first = create(messages=messages, tool_choice="required", parallel_tool_calls=False, **settings)
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and json.loads(call.function.arguments).keys() == {"open"}
    before = [*first.prompt_token_ids, *choice.token_ids]

    messages += [choice.message, {"role": "tool", "content": "yes", "tool_call_id": call.id}]
    named = {"type": "function", "function": {"name": "door"}}
    chunks = list(create(messages=messages, tool_choice=named, stream=True, **settings))
    assert chunks[0].prompt_token_ids[: len(before)] == before, "the next turn begins with the same tokens"
    deltas = [one.delta for chunk in chunks for one in chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert calls[0].function.name == "door" and json.loads(arguments).keys() == {"open"}
    assert chunks[-1].choices[0].finish_reason == "stop", "the tool was chosen"

    function = {"name": "door", "arguments": arguments}
    messages += [
        {"role": "assistant", "tool_calls": [{"id": calls[0].id, "type": "function", "function": function}]},
        {"role": "tool", "content": "no", "tool_call_id": calls[0].id},
    ]
    ids = [token for chunk in chunks for one in chunk.choices for token in getattr(one, "token_ids", None) or ()]
    third = create(messages=messages, tool_choice="none", **settings)
    assert third.prompt_token_ids[: len(before)] == before
    assert third.prompt_token_ids[len(chunks[0].prompt_token_ids) :][: len(ids)] == ids
    assert third.choices[0].message.content and not third.choices[0].message.tool_calls


def test_openai_s_own_client_gets_json(openai_client, no_white_space):
    form = {"type": "json_schema", "json_schema": {"name": "door", "schema": OPEN}}
    settings = {"model": openai_client.models.list().data[0].id, "max_tokens": 100, "seed": 5}
    settings["logit_bias"] = no_white_space
    answer = openai_client.chat.completions.create(
        messages=[{"role": "user", "content": "Is it open?"}], response_format=form, **settings
    )
    assert json.loads(answer.choices[0].message.content).keys() == {"open"}


def test_a_stop_text_is_named_and_no_stream_goes_beyond_it(http):
    body = {"prompt": [list(PROMPT)], "max_tokens": 60, "seed": 6}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    (whole,) = http.post("/v1/completions", json=body | {"stop": [stop]}).json()["choices"]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop) and stop not in whole["text"]
    lines = http.post("/v1/completions", json=body | {"stop": [stop], "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert events[-1]["choices"][0]["stop_reason"] == stop


def test_a_request_without_a_seed_says_which_index_was_drawn(http):
    body = {"prompt": [list(PROMPT)], "max_tokens": 16}
    drawn = http.post("/v1/completions", json=body).json()["choices"][0]
    key = drawn["tailrace"]
    headers = {"X-Tailrace-Index": str(key["index"]), "X-Tailrace-Group": key["group"]}
    again = http.post("/v1/completions", json=body, headers=headers).json()["choices"][0]
    other = http.post("/v1/completions", json=body).json()["choices"][0]
    assert again["text"] == drawn["text"] and other["tailrace"]["index"] != key["index"]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 0}, "greater than or equal to 0.01"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"x": 1}}, "Stream options can only be defined"),
        ("/inference/v1/generate", {"token_ids": [1], "output_mode": "text"}, "output_mode: not honoured here"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "greater than or equal to 0"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": r"a[^\s\S]"}}, "no token is left"),
        ("/v1/completions", {"prompt": []}, "Either prompt or prompt_embeds must be provided"),
        ("/v1/completions", {"prompt": [600_000]}, "Token id 600000 is out of vocabulary"),
        ("/v1/completions", {"prompt": [5] * 600}, "maximum context length is 512 tokens"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_logprobs": 3}}, "top_logprobs"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {}}, "mm_hashes"),
        ("/inference/v1/generate", {"token_ids": [1], "features": IMAGE}, "takes text alone; remove them"),
        ("/update_weights", {"weight_dir": "/nowhere"}, "/nowhere"),
        ("/detokenize", {"tokens": [-1]}, "-1 is not in the vocabulary"),
    ],
)
def test_what_is_not_honoured_is_refused_in_one_line(http, path, body, reason):
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400
    assert reason in error["message"] and "\n" not in error["message"]


def test_roles_bodies_and_bad_json_are_refused_at_once(address, http):
    url, _ = address
    with caller(url, "observer") as observer:
        assert observer.get("/weight_info").json()["weight_version"] == "0"
        refused = observer.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 403 and "needs role evaluator" in refused.json()["error"]["message"]
    with caller(url, "evaluator") as evaluator:
        assert evaluator.post("/update_weights", json={"weight_dir": "/tmp"}).status_code == 403
    assert http.post("/v1/completions", json={"prompt": "a" * 30_000}).status_code == 413
    chunks = (b'{"prompt": "' for _ in range(3_000))
    assert http.post("/v1/completions", content=chunks).status_code == 413
    assert http.post("/v1/completions", content=b"{nonsense").status_code == 400
    bad = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Tailrace-Index": "-3"})
    assert bad.status_code == 400 and "x-tailrace-index" in bad.json()["error"]["message"]


def test_a_client_that_hangs_up_leaves_nothing_behind(address, http):
    _, client = address
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 480}, timeout=httpx.Timeout(60, read=0.2))
    until(lambda: client.status_blocking().running + client.status_blocking().waiting == 0)
    body = {"prompt": "a", "max_tokens": 480, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    until(lambda: client.status_blocking().running + client.status_blocking().waiting == 0)


def test_tokens_come_and_go(http):
    text = "A word or two"
    tokens = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": text}], "add_generation_prompt": False}
    of_chat = http.post("/tokenize", json=chat | {"return_token_strs": True}).json()
    texts = of_chat["token_strs"]
    assert texts[0] == "<|im_start|>" and "".join(texts).startswith("<|im_start|>system")
    assert len(texts) == len(of_chat["tokens"]) > tokens["count"]
    assert http.get("/get_world_size").json() == {"world_size": 2}
    assert http.get("/server_info").json()["logprobs_mode"] == "processed_logprobs"


def test_weights_of_a_folder_are_in_every_later_answer(address, http, tiny_model, tmp_path):
    folder = perturbed(tiny_model, tmp_path / "other", seed=1, scale=0.5)
    before = asked(http, 0)["choices"][0]
    assert http.post("/update_weights", json={"weight_dir": str(folder)}).json()["weight_version"] == "1"
    after = asked(http, 0)["choices"][0]
    assert {span["version"] for span in after["weight_versions"]} == {"1"}
    assert after["token_ids"] != before["token_ids"]
    assert http.get("/weight_info").json()["weight_version"] == "1"
    assert asyncio.run(address[1].status()).weights_version == 1


def test_sampling_parameters_arrive(http):
    greedy = [asked(http, n, sampling_params={"max_tokens": 8, "temperature": 0})["choices"][0] for n in (1, 2)]
    assert greedy[0]["token_ids"] == greedy[1]["token_ids"]
    assert SamplingParams(temperature=0).temperature == 0


def test_a_service_sleeps_in_the_middle_of_a_request_and_says_what_it_holds(address, http):
    url, _ = address
    sampling = {"max_tokens": 200, "top_k": 20, "sampling_mask": True, "ignore_eos": True}
    expected = asked(http, 7, sampling_params=sampling)["choices"][0]
    with caller(url, "trainer") as trainer, ThreadPoolExecutor(1) as pool:
        held = trainer.post("/weight_checker", json={"action": "checksum"}).json()
        assert held["checksums"] and held["mismatches"] == []
        again = pool.submit(asked, http, 7, sampling_params=sampling)
        until(lambda: "tailrace_gateway_open_requests" in http.get("/metrics").text)
        assert trainer.post("/sleep?mode=keep").json()["status"] == "sleeping"
        assert trainer.get("/is_sleeping").json() == {"is_sleeping": True}
        assert trainer.post("/weight_checker", json={"action": "checksum"}).status_code == 400
        assert trainer.post("/wake_up").json()["status"] == "awake"
        choice = again.result(timeout=300)["choices"][0]
        compared = {"action": "compare", "baseline": held["checksums"]}
        assert trainer.post("/weight_checker", json=compared).json() == {"match": True, "mismatches": []}
    assert choice["token_ids"] == expected["token_ids"] and choice["sampling_mask"] == expected["sampling_mask"]
    for token, kept in zip(choice["token_ids"], choice["sampling_mask"], strict=True):
        assert token in kept and 1 <= len(kept) <= 20


@pytest.mark.parametrize("killed", [pytest.param("#Coordinator#", marks=pytest.mark.long), "#Gateway#"])
def test_requests_in_flight_outlive_a_killed(address, killed):
    url, client = address
    over_http = Client(url, TOKENS["evaluator"])
    sampling = SamplingParams(ignore_eos=True)
    group = PromptGroup(prompt_id="long", token_ids=PROMPT, samples=16, max_tokens=400, sampling=sampling)

    def roll(name: str) -> list:
        (found,) = over_http.rollout_blocking(RolloutBatch(batch_id=name, groups=(group,), seed=4))
        return [sample.token_ids for sample in found.samples]

    expected = roll("undisturbed")
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(roll, f"without {killed}")
        until(lambda: client.status_blocking().running)
        assert kill_actors(killed) == 1
        assert again.result(timeout=400) == expected
