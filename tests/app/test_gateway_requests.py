"""The gateway's requests, names and access control, without a service."""

import asyncio
import json
import threading
import tracemalloc
from base64 import b64encode
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from tailrace.app.gateway import service
from tailrace.app.gateway.access_control import AccessControl, read_tokens
from tailrace.app.gateway.answer_text import text_of
from tailrace.app.gateway.chat.messages import RequestedMessage, fitting
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.edge import json_body
from tailrace.app.gateway.edge.errors import error_body
from tailrace.app.gateway.edge.json_body import MAX_DEPTH, fault_of
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.naming import Naming, index_of
from tailrace.app.gateway.requests import CompletionRequest, Sampled, TokensRequest
from tailrace.app.gateway.routes import _add_generation
from tailrace.app.gateway.service import GatewayService
from tailrace.app.gateway.tokenizing import Detokenized, add_tokenizing
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import SampleResult
from tailrace.deployments.messages.session import MAX_INDEX
from tailrace.policies.protocol.actions import SampleEnd

TOKEN = "a-token-of-24-characters"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logprob_token_ids": [1]}, "logprob_token_ids: not honoured"),
        ({"watermarking": True}, "watermarking: not honoured"),
        ({"some_new_field": 3}, "some_new_field: not honoured here; remove it"),
    ],
)
def test_a_field_that_means_something_and_is_not_honoured_is_refused(fields, reason):
    with pytest.raises(ValidationError, match=reason):
        Sampled(**fields)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (CompletionRequest, {"prompt": "a", "best_of": 2}, "best_of: give n instead"),
        (CompletionRequest, {"prompt": "a", "max_completion_tokens": 2}, "max_completion_tokens: give max_tokens"),
        (CompletionRequest, {"prompt": "a", "guided_json": {"a": 1}}, "guided_json: give structured_outputs instead"),
        (TokensRequest, {"token_ids": [1], "n": 2}, "n: give it in sampling_params"),
        (TokensRequest, {"token_ids": [1], "sampling_params": {"best_of": 2}}, "best_of: give n instead"),
        (Detokenized, {"tokens": [1], "n": 2}, "n: not honoured here; remove it"),
    ],
)
def test_a_refusal_names_what_to_give_instead(kind, fields, reason):
    with pytest.raises(ValidationError, match=reason):
        kind(**fields)


def test_fields_whose_values_mean_nothing_are_taken():
    """As openai's client, TRL and prime-rl send them."""
    Sampled(user="me", repetition_penalty=1.0, presence_penalty=0.0, stop=[], logit_bias=None, min_tokens=0)
    TokensRequest(
        token_ids=[1], cache_salt="v3", priority=0, sampling_params={"skip_special_tokens": False, "logprobs": 1}
    )


def test_sampling_parameters_are_a_group_s():
    sampling = Sampled(temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, stop_token_ids=[7]).sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert sampling.stop_token_ids == (7,) and Sampled().sampling().temperature == 1.0
    with pytest.raises(ValueError, match="top_p"):
        Sampled(top_p=2).sampling()


def test_rules_for_tokens_are_a_group_s():
    given = {"stop": "\n", "logit_bias": {"5": 1}, "repetition_penalty": 1.1, "bad_words": [], "min_tokens": 0}
    sampling = CompletionRequest(prompt="a", **given, response_format={"type": "json_object"}).sampling()
    assert (sampling.stop, sampling.logit_bias, sampling.repetition_penalty) == (("\n",), ((5, 1.0),), 1.1)
    assert sampling.structured_outputs.json_object and not Sampled(stop=[], logit_bias={}).sampling().changes_logits
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    assert (
        CompletionRequest(prompt="a", response_format=schema).sampling().structured_outputs.json_schema
        == '{"type": "object"}'
    )
    tags = {"type": "structural_tag", "format": {"type": "any_text"}}
    form = CompletionRequest(prompt="a", response_format=tags).sampling().structured_outputs
    assert form.structural_tag == '{"type": "structural_tag", "format": {"type": "any_text"}}'
    for wrong in ({"type": "grammar"}, {"type": "json_schema"}):
        with pytest.raises(ValidationError, match="response_format"):
            CompletionRequest(prompt="a", response_format=wrong)
    for loose in ({"type": "text", "schema": {}}, {"type": "json_object", "x": 1}):
        CompletionRequest(prompt="a", response_format=loose)
    with pytest.raises(ValueError, match="schema is not there"):
        CompletionRequest(prompt="a", response_format={"type": "json_schema", "json_schema": {"name": "n"}}).sampling()
    with pytest.raises(ValueError, match="remove ignore_eos and min_tokens"):
        Sampled(structured_outputs={"regex": "a"}, min_tokens=2).sampling()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": 1, "5": 2}, "'x': '1' is not a token id and a number"),
        ({"x": 1, "5": "much"}, "'x': '1', '5': 'much' are not token ids and numbers"),
    ],
)
def test_each_bias_that_is_none_is_named(given, said):
    with pytest.raises(ValueError, match=said):
        Sampled(logit_bias=given)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [{"text": "a"}]),
        ([1, 2], [{"token_ids": (1, 2)}]),
        (["a", "b"], [{"text": "a"}, {"text": "b"}]),
        (["12", "7"], [{"text": "12"}, {"text": "7"}]),  # they were token ids
        ([[1], [2, 3]], [{"token_ids": (1,)}, {"token_ids": (2, 3)}]),
    ],
)
def test_a_completion_s_prompt_is_one_or_several(prompt, prompts):
    assert CompletionRequest(prompt=prompt).prompts(None) == prompts


def line(**message) -> dict:
    return RequestedMessage(**message).for_template()


def test_messages_are_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = ChatRequest(messages=[{"role": "user", "content": parts}]).messages
    assert message.for_template() == {"role": "user", "content": "a\nb"}
    (message,) = ChatRequest(messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]).messages
    with pytest.raises(
        ValueError, match="messages: content of type 'video_url': a chat is text and images here; remove"
    ):
        message.for_template()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": None}, {"type": "text", "text": "b"}], "b"),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
        ([{"type": "refusal", "refusal": "no"}, "b"], "no\nb"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "output_text", "text": "a"}], "hm\na"),
    ],
)
def test_contents_are_taken_as_vllm_takes_them(content, text):
    assert line(role="assistant", content=content) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        *((bad, {}) for bad in (
            '{"city": "Par', '{"city": "the "old" town"}', "[1]", "42", "", "null", None, [1], {}, '{"a": "\\ud800"}',
            '{"a":' * 2_000 + "1" + "}" * 2_000, '{"a": ' + "9" * 5_000 + "}",
        )),
    ],
)  # fmt: skip
def test_arguments_of_a_call_are_an_object_for_the_template(arguments, rendered):
    """As vLLM 0.32: a conversation must not be lost because a model wrote no JSON."""
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": arguments}}
    (found,) = line(role="assistant", tool_calls=[call])["tool_calls"]
    assert found == {"id": "1", "function": {"arguments": rendered, "name": "w"}, "type": "function"}
    assert list(found) == ["id", "function", "type"] and list(found["function"]) == ["arguments", "name"]


def test_a_message_means_the_same_in_each_form_in_which_it_is_sent_back():
    def call(**fields) -> dict:
        return {"id": "1", "function": {"name": "w", "arguments": '{"a": 1, "b": [2]}'}} | fields

    def normal(**message) -> dict:
        return RequestedMessage(**{"role": "assistant", "content": "", "tool_calls": [call()]} | message).normal()

    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "reasoning_content": None}
    arguments = {"name": "w", "arguments": {"b": [2], "a": 1}}
    for same in (
        {"content": None}, {"content": []}, empty, {"tool_calls": [call(index=0, type="function")]},
        {"tool_calls": [call(function=arguments)]}, {"tool_calls": [call(function=arguments | {"x": 1})]},
    ):  # fmt: skip
        assert normal(**same) == normal()
    for other in (
        {"content": "x"}, {"role": "user"}, {"tool_calls": [call(), call()]}, {"reasoning": "x"}, {"tool_calls": []},
        {"tool_calls": [call(function=arguments | {"arguments": '{"a": 1, "b": [2'})]},
    ):  # fmt: skip
        assert normal(**other) != normal()


def test_thoughts_tasks_and_names_reach_the_template_as_vllm_hands_them_on():
    assert line(role="assistant", content="a", reasoning_content="r", name="bob")["reasoning"] == "r"
    assert line(role="assistant", content="a", reasoning="r")["reasoning_content"] == "r"
    assert "reasoning" not in line(role="user", content="a", reasoning="r")
    assert "tool_call_id" not in line(role="user", content="a", tool_call_id="1")
    assert line(role="tool", content="a", tool_call_id="1")["tool_call_id"] == "1"


def test_a_developer_is_the_system_of_a_template_without_that_role():
    lines = [line(role=role, content=role[0]) for role in ("system", "user", "developer", "assistant")]
    assert fitting(lines, "{% if role == 'developer' %}") == lines
    assert [(one["role"], one["content"]) for one in fitting(lines, "")] == [
        ("system", "s\n\nd"), ("user", "u"), ("assistant", "a")
    ]  # fmt: skip
    assert fitting(lines[2:], None)[0] == {"role": "system", "content": "d"}
    assert fitting(lines[:2], "") == lines[:2]


def test_the_text_of_an_answer_has_the_stop_if_it_is_asked_for():
    prompts = SimulatedText()
    ended = {"sample_index": 0, "logprobs": (0.0,) * 3, "raw_logprobs": (0.0,) * 3, "finish_reason": SampleEnd.STOP}
    by_text = SampleResult(token_ids=(1, 2, 3), text="1 ", stop_reason="2 3", **ended)
    by_token = SampleResult(token_ids=(1, 2, 3), text="1 2", stop_reason=3, **ended)
    for special in (False, True):
        assert [text_of(one, prompts, special) for one in (by_text, by_token)] == ["1 ", "1 2"]
        assert [text_of(one, prompts, special, True) for one in (by_text, by_token)] == ["1 2 3", "1 2 3"]


class SimulatedText:
    """A tokenizer whose text is its token ids."""

    def decode(self, token_ids, special: bool = False) -> str:
        return " ".join(map(str, token_ids))


class ReadOnThreads:
    """A tokenizer of characters that is never called on the event loop's thread."""

    def encode(self, text: str, special: bool = False) -> list[int]:
        assert threading.current_thread() is not threading.main_thread()
        return list(map(ord, text))

    def decode(self, token_ids, special: bool = False) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return "".join(map(chr, token_ids))

    def name(self, token: int) -> str:
        return f"<{chr(token)}>"

    def foreign(self, token_ids) -> None:
        return None


def test_a_long_text_stops_no_other_request_of_the_gateway():
    """The event loop encoded it itself: for a text of 10 MB longer than the lease of all open requests."""
    wanted = []

    class Service:
        async def model(self, name=None):
            return SimpleNamespace(prompts=ReadOnThreads(), max_model_len=99, adapter=None)

        async def generate(self, role, asked, naming):
            wanted.append(asked.prompts)
            raise ZeroDivisionError

    async def story():
        app = FastAPI()
        add_tokenizing(app, Service())
        _add_generation(app, Service(), GatewayConfig())
        transport = httpx.ASGITransport(AccessControl(app, GatewayConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            found = (await http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
            assert found == {"count": 2, "max_model_len": 99, "tokens": [97, 98], "token_strs": ["<a>", "<b>"]}
            assert (await http.post("/detokenize", json={"tokens": [97, 98]})).json() == {"prompt": "ab"}
            with pytest.raises(ZeroDivisionError):
                await http.post("/v1/completions", json={"prompt": "ab", "add_special_tokens": False})
        assert wanted == [[{"token_ids": (97, 98)}]]

    asyncio.run(story())


def test_a_gateway_is_replaced_once_the_service_has_another_model_or_context(monkeypatch):
    """It went on with the tokenizer and the context of the model before."""

    class Client:
        async def status(self):
            if away:
                await asyncio.Event().wait()
            return SimpleNamespace(model=folder, max_model_len=context)

    gateway = GatewayService(lambda role: Client(), GatewayConfig())
    away, folder, context = False, "/m/new", 9
    asyncio.run(gateway.check_model())  # nothing is loaded
    gateway._model = SimpleNamespace(root="/m/old", max_model_len=9)
    with pytest.raises(RuntimeError, match="the service has /m/new, and this gateway has loaded /m/old"):
        asyncio.run(gateway.check_model())
    folder = "/m/old"
    asyncio.run(gateway.check_model())
    context = 99
    with pytest.raises(RuntimeError, match="the service has /m/old"):
        asyncio.run(gateway.check_model())
    monkeypatch.setattr(service, "CHECK_S", 0.01)
    away = True
    asyncio.run(gateway.check_model())


@pytest.mark.parametrize(("numbers", "on_thread"), [(10, False), (200_000, True)])
def test_a_large_body_stops_no_other_request_of_the_gateway(monkeypatch, numbers, on_thread):
    """The event loop checked each of its lists itself."""
    threads, parse = [], json_body.parsed
    monkeypatch.setattr(json_body, "parsed", lambda body: threads.append(threading.current_thread()) or parse(body))

    async def receive() -> dict:
        return {"type": "http.request", "body": json.dumps([1] * numbers).encode()}

    request = json_body.StrictRequest({"type": "http", "headers": []}, receive)
    assert asyncio.run(request.json()) == [1] * numbers
    assert [one is not threading.main_thread() for one in threads] == [on_thread]


def test_errors_are_one_line_of_text_and_name_the_field():
    for message, param in (
        ("top_p: too large", "top_p"), ("sampling_params: watermarking: no", "sampling_params.watermarking"),
        ("messages.0.role: Field required", "messages.0.role"), ("the body is not JSON: at 5", None),
    ):  # fmt: skip
        assert error_body(400, message)["error"]["param"] == param
    found = error_body(400, "a\nb \ud83d" + "c" * 10_000)["error"]["message"]
    assert found.encode() and found.startswith("a b \\ud83d") and len(found) < 2_000


@pytest.mark.parametrize(("depth", "too_deep"), [(MAX_DEPTH - 4, False), (MAX_DEPTH - 3, True)])
def test_the_check_of_a_body_needs_less_memory_than_the_body(depth, too_deep):
    """It copied the path of every list inside a long key: 30 KB took 75 MB and a second."""
    key, inner = "k" * 20_000, []
    for _ in range(depth):
        inner = [inner]
    body = json.dumps({key: {key: [[]] * 20_000 + [inner]}}).encode()
    value = json.loads(body)
    tracemalloc.start()
    found = fault_of(value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(body) and (found is not None) == too_deep
    assert found is None or (found.endswith(": nested deeper than 128 levels") and len(found) < 300)


def test_names_come_from_headers_then_from_the_seed_then_by_chance():
    headers = {"x-tailrace-seed": "3", "x-tailrace-step": "4", "x-tailrace-group": "g", "x-tailrace-index": "5"}
    assert Naming.of(headers, 9) == (3, 4, "g", 5, 0, 0, None, False)
    assert Naming.of(headers | {"x-tailrace-turn": "2", "x-tailrace-hold": "60"}, 9)[3:6] == (5, 2, 60)
    assert Naming.of({}, 9) == (0, 0, None, 9, 0, 0, None, False)
    for drawn in (None, -1):
        assert Naming.of({}, drawn).index != Naming.of({}, drawn).index
    prompt = {"token_ids": (1, 2)}
    assert Naming.of({}, 9).group_of(prompt) == Naming.of({}, 8).group_of({"token_ids": [1, 2]})
    assert Naming.of({}, 9).group_of(prompt) != Naming.of({}, 9).group_of({"token_ids": (1, 3)})
    with pytest.raises(ValueError, match=r"header x-tailrace-step: '-1' is not a number from 0 to"):
        Naming.of({"x-tailrace-step": "-1"}, None)


def test_great_seeds_have_an_index_too():
    assert index_of(7) == 7
    assert 0 <= index_of(-5) < MAX_INDEX and index_of(-5) != index_of(-6)
    assert 0 <= index_of(2**63) < MAX_INDEX and index_of(2**63) != index_of(2**63 + 1)


def test_tokens_have_roles(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# ours\nevaluator {TOKEN}\n\ntrainer {TOKEN[::-1]}\n")
    assert read_tokens(path) == {TOKEN: Role.EVALUATOR, TOKEN[::-1]: Role.TRAINER}
    for text, reason in (("", "no token in it"), ("king " + TOKEN, "line 1"), ("trainer short", "16 characters")):
        path.write_text(text)
        with pytest.raises(ValueError, match=reason):
            read_tokens(path)


def passed(
    access: AccessControl, body: bytes = b"", path="/v1/models", method="POST", **headers: str
) -> tuple[int, dict]:
    """The status of one request, and the scope that the routes saw."""
    sent = []

    async def receive() -> dict:
        return {"type": "http.request", "body": body}

    async def send(message: dict) -> None:
        sent.append(message)

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "method": method, "headers": named}
    asyncio.run(access(scope, receive, send))
    return sent[0]["status"], scope | {"answer": dict(sent[0]["headers"])}


async def answering(scope, receive, send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_access_is_by_token_size_and_number(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"evaluator {TOKEN}")
    access = AccessControl(answering, GatewayConfig(tokens_file=str(path), max_body_bytes=10))
    status, scope = passed(access, authorization=f"Bearer {TOKEN}")
    assert (status, scope["role"]) == (200, Role.EVALUATOR)
    assert passed(access)[0] == passed(access, authorization=f"Basic {TOKEN}")[0] == 401
    assert passed(access, authorization=f"Bearer {TOKEN[:-1]}")[0] == 401
    basic = b64encode(f"evaluator:{TOKEN}".encode()).decode()  # of http://evaluator:TOKEN@HOST
    assert passed(access, authorization=f"Basic {basic}")[1]["role"] is Role.EVALUATOR
    assert passed(access, authorization=f"Digest {basic}")[0] == 401
    assert passed(access, b"0123456789a", authorization=f"Bearer {TOKEN}")[0] == 413
    assert passed(access, authorization=f"Bearer {TOKEN}", content_length="11")[0] == 413
    access._open = GatewayConfig().max_open
    assert passed(access, authorization=f"Bearer {TOKEN}")[0] == 429
    assert passed(AccessControl(answering, GatewayConfig()))[1]["role"] is Role.EVALUATOR


def test_a_full_gateway_answers_those_that_watch_it():
    """A load balancer took 429 for a gateway that is ill, and ended it with all that it had open."""
    access = AccessControl(answering, GatewayConfig(max_open=3))
    paths = ("/v1/models", "/health", "/liveness", "/metrics")
    for opened, refused in ((2, ()), (3, paths[:1]), (3 + 16, paths)):
        access._open = opened
        for path in paths:
            assert passed(access, path=path, method="GET")[0] == (429 if path in refused else 200)


@pytest.mark.parametrize(
    ("method", "origin", "status"),
    [
        ("POST", "https://evil.example", 403),
        ("DELETE", "null", 403),
        ("POST", "http://localhost:8000", 200),
        ("POST", None, 200),
        ("GET", "https://evil.example", 200),
    ],
)
def test_a_page_of_another_site_can_make_a_browser_read_alone(method, origin, status):
    """A browser adds the token that it knows; the answer to a GET is kept from such a page by the browser itself."""
    headers = {"host": "localhost:8000"} | ({} if origin is None else {"origin": origin})
    assert passed(AccessControl(answering, GatewayConfig()), method=method, **headers)[0] == status


@pytest.mark.parametrize("tokens", [None, "trainer anyone\n", f"trainer {TOKEN}\n"])
def test_a_page_that_points_its_name_to_loopback_has_no_role_without_a_token(tmp_path, tokens):
    """Its requests were those of the gateway's own site, so with `trainer anyone` it could load weights."""
    path = tmp_path / "tokens"
    path.write_text(tokens or "")
    access = AccessControl(answering, GatewayConfig(tokens_file=None if tokens is None else str(path)))
    given = {"authorization": f"Bearer {TOKEN}"} if TOKEN in (tokens or "") else {}
    for name, is_own in (("evil.example:8000", False), ("localhost.evil.example", False), ("127.0.0.1:8000", True),
                         ("[::1]:8000", True), ("localhost", True)):  # fmt: skip
        status, _ = passed(access, method="POST", host=name, origin=f"http://{name}", **given)
        assert status == (200 if is_own or given else 403)


def test_a_role_may_be_anyone_s_and_a_wrong_token_has_none(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"observer {TOKEN}\ntrainer anyone\n")
    access = AccessControl(answering, GatewayConfig(tokens_file=str(path)), nobodys)
    assert passed(access)[1]["role"] is Role.TRAINER
    assert passed(access, authorization=f"Bearer {TOKEN}")[1]["role"] is Role.OBSERVER
    assert passed(access, authorization=f"Bearer {TOKEN[:-1]}")[0] == 401
    assert passed(access, path="/v1/trajectories/1/rewards", authorization="Bearer other")[0] == 401


def test_a_role_is_not_anyone_s_on_an_address_that_others_reach(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("trainer anyone")
    with pytest.raises(ValueError, match=r"anyone is for loopback; host is 10\.0\.0\.7"):
        AccessControl(answering, GatewayConfig(tokens_file=str(path), host="10.0.0.7"))


async def nobodys(trajectory: str, key: bytes) -> bool:
    """No key is a trajectory's."""
    return False


@pytest.mark.parametrize(("path", "asked"), [("/board", True), ("/board/stream", True), ("/v1/models", False)])
def test_a_browser_asks_for_a_token_where_the_board_is(path, asked, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"observer {TOKEN}")
    status, scope = passed(AccessControl(answering, GatewayConfig(tokens_file=str(tokens))), path=path, method="GET")
    assert status == 401 and (b"www-authenticate" in scope["answer"]) is asked


def test_a_port_beyond_loopback_needs_tokens():
    with pytest.raises(ValidationError, match=r"host: 10.0.0.7 is open to others; set tokens_file"):
        GatewayConfig(host="10.0.0.7")
    assert GatewayConfig(host="10.0.0.7", tokens_file="/tokens").host == "10.0.0.7"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_all_interfaces_are_refused(host):
    with pytest.raises(ValidationError, match="not all interfaces"):
        GatewayConfig(host=host)
