"""HTTP as clients of other servers speak it: nulls, extra keys, trainers' defaults, bodies that are no JSON, and the
words of refusals. Over the simulated cluster, in virtual time."""

import json

import httpx
import pytest
from virtual_cluster import play as play_on

from simulated.test_gateway import ChattingPrompts
from tailrace.app.gateway.edge.honoured import NEUTRAL
from tailrace.app.gateway.edge.json_body import MAX_DEPTH
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService, ServedModel
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.stepper import EOS

COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
USER = {"role": "user", "content": "5 6"}
GIVEN = {COMPLETIONS: {"prompt": [5, 6]}, CHAT: {"messages": [USER]}, TOKENS: {"token_ids": [5, 6]}}
CONTEXT = 512


@pytest.fixture
def play(tmp_path):
    """Runs a story with the gateway over a cluster of two replicas. The story gets `ask(path, body, **headers)`, whose
    body may be bytes."""

    def run(story, **sizes):
        async def with_gateway(cluster, client):
            service = GatewayService(lambda role: driver_client(cluster), GatewayConfig())
            service._model = ServedModel("simulated", "simulated", CONTEXT, ChattingPrompts())
            app = make_app(service, GatewayConfig())
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:

                async def ask(path, body, **headers):
                    content = body if isinstance(body, bytes) else json.dumps(body).encode()
                    return await http.post(
                        path, content=content, headers={"content-type": "application/json"} | headers
                    )

                await story(ask, app)

        play_on(with_gateway, tmp_path, **({"mean_tokens": 12} | sizes))

    return run


def fields_of(app, path: str) -> set[str]:
    """The fields of a route's body, by the application's own OpenAPI."""
    api = app.openapi()
    name = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    return set(api["components"]["schemas"][name]["properties"])


def refused(answer, *words: str, param: str | None = None) -> bool:
    """Whether an answer is a refusal of one line with these words."""
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == 400 and error["type"] == "BadRequestError", answer.text
    assert "\n" not in error["message"] and all(word in error["message"] for word in words), error
    assert param is None or error["param"] == param, error
    return True


async def all_bounded(ask, path: str, body: dict):
    """The answer of a request of two tokens."""
    bound = {"max_tokens": 2}
    if path == TOKENS:
        bound = {"sampling_params": bound | (body.get("sampling_params") or {})}
        body = {name: value for name, value in body.items() if name != "sampling_params"}
    return await ask(path, GIVEN[path] | bound | body)


@pytest.mark.parametrize("path", GIVEN)
def test_null_is_not_given_for_every_field_of_every_object(play, path):
    async def story(ask, app):
        names = (fields_of(app, path) | NEUTRAL.keys()) - GIVEN[path].keys() - {"max_tokens"}
        body = dict.fromkeys(names)
        if path == TOKENS:
            body["sampling_params"] = dict.fromkeys(
                {"n", "seed", "stop", "logprobs", "structured_outputs"} | NEUTRAL.keys()
            )
        answer = await all_bounded(ask, path, body)
        assert answer.status_code == 200, answer.text
        nested = {"include_usage": None, "continuous_usage_stats": None}
        assert (await all_bounded(ask, path, {"stream": True, "stream_options": nested})).status_code == 200
        assert refused(await ask(path, GIVEN[path] | dict.fromkeys(GIVEN[path])))

    play(story)


@pytest.mark.parametrize("path", GIVEN)
def test_a_bound_that_is_not_given_has_vllm_s_default(play, path):
    async def story(ask, app):
        for bound in ({}, {"max_tokens": None}):
            more = {"ignore_eos": True}
            body = {"sampling_params": bound | more} if path == TOKENS else bound | more
            answer = await ask(path, GIVEN[path] | body)
            prompt, made = (answer.json()["usage"][name] for name in ("prompt_tokens", "completion_tokens"))
            assert made == (16 if path == COMPLETIONS else CONTEXT - prompt)

    play(story, mean_tokens=10**7)


@pytest.mark.parametrize("path", GIVEN)
def test_values_that_ask_for_nothing_are_taken(play, path):
    skyrl = {
        "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "temperature": 1.0,
        "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0, "stop": None, "seed": -1,
    }  # fmt: skip

    async def story(ask, app):
        for stop in (None, []):
            body = skyrl | {"stop": stop, "logprobs": True if path == CHAT else 0}
            answer = await all_bounded(ask, path, {"sampling_params": body} if path == TOKENS else body)
            assert answer.status_code == 200, answer.text
        known = fields_of(app, path)
        for name, values in NEUTRAL.items():
            for value in values if name not in known else ():
                answer = await all_bounded(ask, path, {name: value})
                assert answer.status_code == 200, (name, answer.text)
        assert refused(await all_bounded(ask, path, {"watermarking": True}), param="watermarking")

    play(story)


@pytest.mark.parametrize("path", GIVEN)
def test_a_seed_of_minus_one_is_drawn_and_others_are_seeds(play, path):
    async def story(ask, app):
        async def index(seed):
            body = {"sampling_params": {"seed": seed}} if path == TOKENS else {"seed": seed}
            answer = await all_bounded(ask, path, body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["tailrace"]["index"]

        assert await index(-1) != await index(-1) and await index(None) != await index(None)
        for seed in (-2, -(2**63), 2**63 - 1):
            assert await index(seed) == await index(seed)
        for seed in (2**63, -(2**63) - 1, 10**40):
            body = {"sampling_params": {"seed": seed}} if path == TOKENS else {"seed": seed}
            assert refused(await all_bounded(ask, path, body), "seed")

    play(story)


def test_extra_keys_inside_of_objects_pass(play):
    async def story(ask, app):
        extras = {"x_extra": {"a": [1]}}
        call = {"id": "1", "type": "function", "index": 0, "function": {"name": "w", "arguments": "{}"} | extras}
        messages = [
            USER | extras,
            {"role": "assistant", "content": [{"type": "text", "text": "9"} | extras], "tool_calls": [call | extras]},
            USER,
        ]
        form = {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True} | extras,
        }
        tool = {"type": "function", "function": {"name": "w", "parameters": {}} | extras} | extras
        for body in (
            {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
            {"messages": messages},
            {"response_format": {"type": "text"} | extras},
            {"tools": [tool], "tool_choice": "none"},
        ):
            answer = await all_bounded(ask, CHAT, body)
            assert answer.status_code == 200, answer.text
        assert "response_format" not in (await all_bounded(ask, CHAT, {"response_format": form})).text
        assert refused(await all_bounded(ask, CHAT, {"x_extra": 1}), "x_extra: not honoured", param="x_extra")

    play(story)


@pytest.mark.parametrize(("path", "body"), [
    (COMPLETIONS, {"prompt": [5] * 522}), (COMPLETIONS, {"prompt": [5] * 512}), (COMPLETIONS, {"prompt": "5 " * 600}),
    (CHAT, {"messages": [USER | {"content": "5 " * 600}]}), (TOKENS, {"token_ids": [5] * 512}),
])  # fmt: skip
def test_a_prompt_without_room_is_refused_in_the_words_that_clients_know(play, path, body):
    async def story(ask, app):
        words = "This model's maximum context length is 512 tokens. However, your prompt contains "
        for stream in (False, True):
            assert refused(await all_bounded(ask, path, body | {"stream": stream}), words, param="input_tokens")

    play(story)


def test_a_bound_beyond_the_room_is_cut_and_one_beyond_the_context_is_refused_by_vllm_s_rule(play):
    async def story(ask, app):
        for path, name in ((COMPLETIONS, "max_tokens"), (CHAT, "max_tokens"), (CHAT, "max_completion_tokens")):
            full = await ask(path, GIVEN[path] | {name: CONTEXT, "ignore_eos": True})
            assert full.json()["usage"]["total_tokens"] == CONTEXT
            words = f"{name}=513 cannot be greater than max_model_len=512"
            assert refused(await ask(path, GIVEN[path] | {name: CONTEXT + 1}), words, param=name)
        sampling = {"max_tokens": 10**30, "ignore_eos": True}
        full = await ask(TOKENS, GIVEN[TOKENS] | {"sampling_params": sampling})
        assert full.json()["usage"]["total_tokens"] == CONTEXT

    play(story, mean_tokens=10**7)


HALF = b'"a \\ud83d b"'
NO_JSON = {
    b'{"prompt": [5, 6], "temperature": NaN}': "temperature: nan is not a finite number",
    b'{"prompt": [5, 6], "top_p": 1e400}': "top_p: inf is not a finite number",
    b'{"prompt": [5, 6], "logit_bias": {"5": -Infinity}}': "logit_bias.5: -inf is not",
    b'{"prompt": [5, 6], "seed": 1, "seed": 2}': "seed: the key is given twice",
    b'{"prompt": [5, 6], "seed": ' + b"9" * 5_000 + b"}": "thousands of digits",
    b'{"prompt": "\xff"}': "not UTF-8 at byte 13",
    b'{"prompt": ' + b"[" * 100_000: "deeper than 128 levels",
    b'{"prompt": [5], "x": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}": "deeper than 128 levels",
    b'{"prompt": ' + HALF + b"}": "prompt: half of a surrogate pair",
    b'{"prompt": [5], "model": ' + HALF + b"}": "model: half of a surrogate pair",
    b'{"prompt": [5], "\\udc00": 1}': "a key has half of a surrogate pair",
    b'{"prompt": [5], "stop": ["a", ' + HALF + b"]}": "stop.1: half",
    b'{"prompt": [5], "chat_template_kwargs": {"a": [{"b": ' + HALF + b"}]}}": "chat_template_kwargs.a.0.b: half",
    b'"text"': "a valid dictionary",
    b"[1]": "a valid dictionary",
    b"nothing": "the body is not JSON",
    b'{"prompt": [5, 6]': "the body is not JSON",
}


def test_a_body_that_is_no_json_is_refused_in_one_line_on_every_route(play):
    async def story(ask, app):
        for body, words in NO_JSON.items():
            assert refused(await ask(COMPLETIONS, body), words)
        posts = {path for path, of in app.openapi()["paths"].items() if "requestBody" in of.get("post", {})}
        posts = {path for path in posts if "{name}" not in path}  # below a trajectory, whose key comes first
        assert len(posts) > 15
        for path in posts:
            for body in (b'{"model": ' + HALF + b"}", b'{"model": NaN}', b"{", b'{"a": 1, "a": 1}'):
                assert refused(await ask(path, body))
        typed = {"content-type": "text/plain"}
        assert refused(await ask(COMPLETIONS, b'{"prompt": [5]}', **typed), "application/json")
        for name in ("seed", "step", "group", "index", "turn", "hold"):
            headers = {"content-type": b"application/json", f"x-tailrace-{name}": b"\xed\xa0\x80"}
            assert refused(await ask(COMPLETIONS, GIVEN[COMPLETIONS], **headers), f"header x-tailrace-{name}")
        marked = b"\xef\xbb\xbf" + json.dumps(GIVEN[COMPLETIONS]).encode()
        assert (await ask(COMPLETIONS, marked)).status_code == 200

    play(story)


def test_a_list_of_a_million_faults_is_refused_by_its_first(play):
    async def story(ask, app):
        for body in ({"prompt": [None] * 300_000}, {"prompt": [5], "logit_bias": {f"k{n}": 1 for n in range(100_000)}}):
            assert len((await ask(COMPLETIONS, body)).json()["error"]["message"]) < 200

    play(story)


def test_errors_have_the_form_that_the_openapi_declares(play):
    async def story(ask, app):
        for path, of in app.openapi()["paths"].items():
            for method in of.values():
                assert "422" not in method["responses"] and {"4XX", "5XX"} <= method["responses"].keys(), path
        unknown = (await ask(COMPLETIONS, GIVEN[COMPLETIONS] | {"model": "gpt-9"})).json()["error"]
        assert unknown["message"].startswith("The model `gpt-9` does not exist")
        assert (unknown["type"], unknown["param"], unknown["code"]) == ("NotFoundError", "model", 404)
        wrong = await all_bounded(ask, COMPLETIONS, {"prompt": [999_999]})
        assert refused(wrong, "Token id 999999 is out of vocabulary", param="prompt")
        assert refused(await all_bounded(ask, COMPLETIONS, {"top_p": 7}), "top_p: ", param="top_p")
        assert refused(await all_bounded(ask, CHAT, {"messages": [{"content": "a"}]}), param="messages.0.role")

    play(story)


def test_the_stop_is_in_the_text_if_it_is_asked_for_whole_and_streamed(play):
    async def story(ask, app):
        asked = {"prompt": [5, 6], "max_tokens": 300, "seed": 3, "stop_token_ids": [EOS]}
        texts = []
        for include in (False, True):
            body = asked | {"include_stop_str_in_output": include}
            (whole,) = (await ask(COMPLETIONS, body)).json()["choices"]
            assert whole["finish_reason"] == "stop"
            streamed = (await ask(COMPLETIONS, body | {"stream": True})).text.split("\n\n")[:-2]
            pieces = [one for event in streamed for one in json.loads(event.removeprefix("data: "))["choices"]]
            assert "".join(one["text"] for one in pieces) == whole["text"]
            texts.append(whole["text"])
        assert texts[1] == f"{texts[0]} {EOS}"

    play(story)


def test_a_model_is_found_by_its_name(play):
    async def story(ask, app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            (card,) = (await http.get("/v1/models")).json()["data"]
            assert (await http.get(f"/v1/models/{card['id']}")).json() == card
            assert (await http.get("/v1/models/gpt-9")).status_code == 404
            assert (await http.request("TRACE", COMPLETIONS)).headers["allow"] == "POST"

    play(story)
