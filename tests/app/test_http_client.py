"""The HTTP client over a scripted gateway: requests, results, errors, and what it asks again."""

import asyncio
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable

import httpx
import pytest
from test_imports import ROOT

from tailrace.app.calls import resume
from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import (
    AdapterRejected,
    QuotaExceeded,
    RolloutRejected,
    TooLargeForQuota,
    UnknownAdapter,
    WeightsRejected,
)
from tailrace.app.calls.session import SampleCalls
from tailrace.app.calls.single_samples import SingleSamples
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.edge.errors import SampleFailed, error_body, error_of
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.requests import CompletionRequest
from tailrace.app.http import connections
from tailrace.app.http.samples import GatewaySamples
from tailrace.app.http.trajectory_groups import played_groups
from tailrace.app.http.weights_answer import told
from tailrace.app.weights import over_http
from tailrace.app.weights.over_http import HttpWeights
from tailrace.deployments.messages.errors import REFUSED
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch, SamplingParams, WeightsLoaded
from tailrace.http import Client
from tailrace.lab.fuzz.virtual_time import VirtualLoop
from tailrace.policies.protocol.actions import SampleEnd


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(resume, "PAUSE_S", (0.001, 0.002))


class Gateway:
    """A gateway whose tokens are [seed, step, index, version]. `script`: answers that come before that, or errors."""

    def __init__(self):
        self.seen: list[tuple[str, dict, dict]] = []
        self.script: list[httpx.Response | Exception] = []
        self.version, self.sources = 0, []
        self.adapters: dict[str, str] = {}  # folders by name

    def client(self, **settings) -> Client:
        return Client("http://gateway", "a-token", transport=httpx.MockTransport(self._answer), **settings)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"null")
        self.seen.append((request.url.path, body, dict(request.headers)))
        assert request.headers["authorization"] == "Bearer a-token"
        if self.script:
            scripted = self.script.pop(0)
            if isinstance(scripted, Exception):
                raise scripted
            return scripted
        if request.url.path == "/weight_info":
            return httpx.Response(200, json={"weight_version": str(self.version), "weights_digest": "d"})
        if request.url.path == "/update_weights":
            self.version = body["version"]
            self.sources.append(body["weight_dir"])
            aside = {"replica-1": "its score differs"}
            loaded = WeightsLoaded(version=self.version, digest="d", replicas=("replica-0",), set_aside=aside)
            return httpx.Response(200, json=told(loaded))
        if request.url.path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models"):
            return self._of_adapters(request.url.path, body)
        if body.get("model", "model") in ("model", *self.adapters):
            return httpx.Response(200, json={"choices": self._choices(body, request.headers)})
        return refusal(404, f"model {body['model']!r} is not served; 'model' is")

    def _of_adapters(self, path: str, body: dict | None) -> httpx.Response:
        if path == "/v1/models":
            models = [{"id": "model", "parent": None}, *map(card, self.adapters.items())]
            return httpx.Response(200, json={"data": models})
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif self.adapters.pop(body["lora_name"], None) is None:
            return refusal(404, "The lora adapter cannot be found.")
        return httpx.Response(200, text="Success: it is done.")

    def _choices(self, body: dict, headers: httpx.Headers) -> list[dict]:
        naming = Naming.of({key: value.encode().decode("latin-1") for key, value in headers.items()}, None)
        named = {"seed": naming.seed, "step": naming.step, "group": naming.group}
        named |= {"adapter_digest": f"of {self.adapters[body['model']]}"} if "model" in body else {}
        version = str(self.version)
        return [
            {
                "text": f"text {naming.index + number}",
                "finish_reason": "length",
                "weight_versions": [{"version": version, "start": 0, "end": 4}],
                "tailrace": named | {"index": naming.index + number, "weights_digests": {version: "d"}},
                "token_ids": [naming.seed, naming.step, naming.index + number, self.version],
                "prompt_token_ids": [1, 2],
                "logprobs": {"token_logprobs": [-0.1, -0.2, -1 / 3, -1e-7]},
            }
            for number in range(body["n"])
        ]


def card(adapter: tuple[str, str]) -> dict:
    """An entry of /v1/models."""
    name, path = adapter
    return {"id": name, "root": path, "parent": "model", "tailrace": {"version": 1, "digest": f"of {path}"}}


@pytest.fixture
def gateway():
    return Gateway()


OF_ANSWERS = ("return_token_ids", "return_tokens_as_token_ids")


def refusal(status: int, message: str = "no", **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": status}}, headers=headers)


def never_fits(message: str) -> httpx.Response:
    return httpx.Response(400, json=error_body(400, message, "TooLargeForQuota"))


def batch(samples: int = 3, **settings) -> RolloutBatch:
    groups = tuple(PromptGroup(prompt_id=f"p{n}", token_ids=(n, 2), samples=samples, max_tokens=4) for n in range(2))
    return RolloutBatch(**({"batch_id": "b", "groups": groups, "seed": 7, "step": 3} | settings))


def test_it_loads_httpx_and_pydantic_alone():
    """In a fresh interpreter: no Ray, torch, vLLM or numpy."""
    code = """
import sys
import httpx, pydantic
pydantic.create_model("Any", value=(int, pydantic.Field(ge=0)))
known = {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
import tailrace.http
import tailrace
tailrace.RolloutBatch, tailrace.PromptGroup
found = {name.partition(".")[0] for name in sys.modules} - known - {"tailrace"}
found = sorted(name for name in found if not name.startswith("_"))
sys.exit(f"loads {found}" if found else 0)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_every_call_has_a_blocking_twin_and_the_arguments_of_rollout_client():
    calls = {name for name, member in inspect.getmembers(Client, is_call) if name[0] != "_"}
    assert {"rollout", "update_weights", "weight_info", "server_info", "tokenize"} <= calls
    assert all(hasattr(Client, f"{name}_blocking") for name in calls)
    for name in ("open", "rollout", "load_adapter", "unload_adapter", "adapters"):
        assert inspect.signature(getattr(Client, name)) == inspect.signature(getattr(RolloutClient, name))
    for name in ("generate", "stream", "cancel", "close"):
        ours, theirs = (getattr(kind, name) for kind in (GatewaySamples, SingleSamples))
        assert inspect.signature(ours) == inspect.signature(theirs) == inspect.signature(getattr(SampleCalls, name))
    ours, theirs = (inspect.signature(one.update_weights).parameters for one in (Client, RolloutClient))
    assert list(ours) == [name for name in theirs if name not in ("digest", "score")]  # no route takes them


def is_call(member) -> bool:
    return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)


def test_a_batch_comes_as_groups_in_one_request_each(gateway):
    groups = {group.prompt_id: group for group in gateway.client().rollout_blocking(batch())}
    assert sorted(groups) == ["p0", "p1"] and len(gateway.seen) == 2
    group = groups["p1"]
    assert (group.batch_id, group.step, group.prompt_token_ids) == ("b", 3, (1, 2))
    assert [sample.token_ids for sample in group.samples] == [(7, 3, index, 0) for index in range(3)]
    assert group.samples[2].logprobs == (-0.1, -0.2, -1 / 3, -1e-7) and group.samples[2].text == "text 2"
    assert group.samples[0].finish_reason is SampleEnd.LENGTH
    (segment,) = group.samples[0].segments
    assert (segment.weights_version, segment.weights_digest, segment.end) == (0, "d", 4)


def test_a_group_of_more_samples_than_a_request_takes_is_asked_for_in_parts(gateway):
    (group, _) = gateway.client().rollout_blocking(batch(samples=2_500))
    assert [sample.sample_index for sample in group.samples] == list(range(2_500))
    assert sorted(body["n"] for _, body, _ in gateway.seen) == [452, 452, 1_024, 1_024, 1_024, 1_024]


def test_a_session_s_samples_come_as_they_end(gateway):
    client = gateway.client()

    async def story():
        async with client.open(seed=5) as session:
            one = await session.generate(text="2 + 2 =", group="süm", index=4, max_tokens=8)
            for _ in range(3):
                session.submit(messages=[{"role": "user", "content": "Hello"}], of=3)
            return one, [answer async for answer in session.samples()]

    one, others = asyncio.run(story())
    assert one.group == "süm" and one.sample.token_ids == (5, 0, 4, 0)
    assert sorted(answer.sample.sample_index for answer in others) == [0, 1, 2]
    paths = [path for path, _, _ in gateway.seen]
    assert paths == ["/v1/completions"] + 3 * ["/v1/chat/completions"]
    assert client.open(seed=5).generate_blocking((1, 2)).sample.token_ids == (5, 0, 0, 0)


def test_bodies_are_what_the_routes_take_for_the_same_group(gateway):
    sampling = SamplingParams(
        temperature=0.5, top_k=4, stop=("\n", "b"), logit_bias={5: 1.5, 7: -2}, repetition_penalty=1.1,
        bad_words=("a b",), allowed_token_ids=(5, 7), structured_outputs={"json": {"type": "object"}},
    )  # fmt: skip
    session = gateway.client().open()
    session.generate_blocking(text="a", sampling=sampling, max_tokens=9)
    session.generate_blocking(messages=[{"role": "user", "content": "a"}], sampling=sampling, max_tokens=9)
    session.generate_blocking((4, 5))
    (_, text, _), (_, chat, _), (_, plain, _) = gateway.seen
    assert CompletionRequest(**text).sampling() == ChatRequest(**chat).sampling() == sampling
    assert CompletionRequest(**plain).sampling() == SamplingParams()
    assert CompletionRequest(**text).prompts(None) == [{"text": "a"}]
    assert CompletionRequest(**plain).prompts(None) == [{"token_ids": (4, 5)}]
    assert [one.normal() for one in ChatRequest(**chat).messages] == [{"role": "user", "content": "a"}]
    assert text["max_tokens"] == chat["max_tokens"] == 9


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ReadError("cut"),
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("half an answer"),
        refusal(429, "full", **{"retry-after": "0"}),
        refusal(503, "away"),
        httpx.Response(502, text="<html>a proxy's page</html>"),
        httpx.Response(404, text="no such path yet"),
    ],
)
def test_a_request_that_may_help_again_is_asked_again_under_the_same_name(gateway, trouble):
    gateway.script = [trouble, trouble]
    (first, *_) = gateway.client().rollout_blocking(batch(groups=batch().groups[:1]))
    assert [sample.token_ids[2] for sample in first.samples] == [0, 1, 2]
    assert len(gateway.seen) == 3 and len({json.dumps(body) for _, body, _ in gateway.seen}) == 1
    assert {headers["x-tailrace-group"] for _, _, headers in gateway.seen} == {"p0"}


def test_retry_after_is_kept(gateway, monkeypatch):
    slept = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(resume.asyncio, "sleep", noted)
    gateway.script = [refusal(429, **{"retry-after": text}) for text in ("3", "86400", "Wed, 21 Oct 2015 07:28:00 GMT")]
    gateway.client().open().generate_blocking((1, 2))
    assert slept == [3.0, 60.0, 0.002]


def test_a_bound_counts_from_the_first_break_of_its_kind():
    """A service that was away for minutes may then, while it starts, answer in another form for a minute."""

    async def story() -> None:
        retries, loop = resume.Retries(10.0), asyncio.get_running_loop()
        while loop.time() < 5.0:
            await retries.wait(resume.Interrupted(ConnectionError("refused")))
        with pytest.raises(ConnectionError, match="a page"):
            while True:
                await retries.wait(resume.Interrupted(ConnectionError("a page"), 1.0))
        assert loop.time() == pytest.approx(6.0, abs=0.01)
        with pytest.raises(ConnectionError, match="refused"):
            while True:
                await retries.wait(resume.Interrupted(ConnectionError("refused")))
        assert loop.time() == pytest.approx(10.0, abs=0.01)

    VirtualLoop().run_until_complete(story())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda: refusal(400, "prompt is empty"), RolloutRejected),
        (lambda: never_fits("a request has 3 samples, quotas.max_samples is 2"), TooLargeForQuota),
        (lambda: refusal(404, "model 'x' is not served"), UnknownAdapter),
        (lambda: refusal(413, "the body has more"), RolloutRejected),
        (lambda: refusal(401, "give one"), PermissionError),
        (lambda: refusal(403, "needs role evaluator"), PermissionError),
        (lambda: refusal(429, "quota"), QuotaExceeded),
        (lambda: refusal(503, "away"), ConnectionError),
        (lambda: httpx.Response(502, text="a page"), ConnectionError),
        (lambda: httpx.ReadError("cut"), ConnectionError),
        (lambda: httpx.Response(200, json={"choices": [{"text": ""}]}), ValueError),
        (lambda: httpx.Response(200, text="a page"), ValueError),
    ],
)
def test_errors_are_those_of_rollout_client(gateway, answer: Callable, error):
    gateway.script = [answer()]
    with pytest.raises(error) as found:
        list(gateway.client(resume_s=0).rollout_blocking(batch(groups=batch().groups[:1])))
    assert "\n" not in str(found.value)
    gateway.script = [answer()]
    with pytest.raises(error):
        gateway.client(resume_s=0).open().generate_blocking((1, 2))


def test_a_sample_that_is_given_up_is_one_failed_sample(gateway):
    gateway.script = [refusal(500, "the engine died"), refusal(500, "the engine died")]
    (group,) = gateway.client(max_open=1).rollout_blocking(batch(groups=batch().groups[:1]))
    assert [sample.finish_reason for sample in group.samples].count(SampleEnd.FAILED) == 1
    (failed,) = [sample for sample in group.samples if sample.finish_reason is SampleEnd.FAILED]
    assert failed.error == "the engine died" and failed.token_ids == ()
    assert {sample.sample_index for sample in group.samples} == {0, 1, 2}


def test_a_sample_that_no_engine_can_run_is_one_failed_sample(gateway):
    """It ended its whole batch, with all groups in flight, as a request that is refused does."""
    body, status = error_of(SampleFailed(f"{REFUSED}adapter: its folder has other files now"))
    gateway.script = [httpx.Response(status, json=body)] * 2
    (group,) = gateway.client(max_open=1).rollout_blocking(batch(groups=batch().groups[:1]))
    ends = [sample.finish_reason for sample in group.samples]
    assert status == 400 and len(ends) == 3 and ends.count(SampleEnd.FAILED) == 1
    assert "adapter: its folder has other files now" in [sample.error for sample in group.samples]


def test_what_http_does_not_carry_is_refused_in_one_line(gateway):
    client = gateway.client()
    for settings in ({"priority": 1}, {"share": 2.0}, {"keep_trace": True}, {"traceparent": "00-1-2-01"}):
        with pytest.raises(ValueError, match="HTTP does not carry it"):
            client.open(**settings)
        with pytest.raises(ValueError, match="HTTP does not carry it"):
            list(client.rollout_blocking(batch(**settings)))
    forced = PromptGroup(prompt_id="f", token_ids=(1,), samples=1, forced_token_ids=((1,),))
    predicted = PromptGroup(prompt_id="p", text="a", prediction={"number": 9, "quality": 0.5})  # was ignored
    unprintable = PromptGroup(prompt_id="a\nb", text="a")
    refused = (forced, "forced_token_ids"), (predicted, "prediction: HTTP"), (unprintable, "printable")
    for group, reason in refused:
        with pytest.raises(ValueError, match=reason):
            list(client.rollout_blocking(batch(groups=(group,))))
    session = client.open()
    with pytest.raises(ValueError, match="deadline_s"):
        session.generate_blocking((1,), deadline_s=3)
    with pytest.raises(NotImplementedError, match="cancel the calls"):
        session.cancel_blocking()
    assert gateway.seen == []
    with pytest.raises(ValueError, match="give http://"):
        Client("gateway:8000")
    with pytest.raises(ValueError, match="one word"):
        Client("http://gateway", "a b")


def test_an_adapter_is_loaded_listed_chosen_and_unloaded(gateway):
    client = gateway.client()
    assert client.load_adapter_blocking("poet", "/poet") == ("poet", 1, "of /poet", "/poet")
    assert gateway.seen[0][1] == {"lora_name": "poet", "lora_path": "/poet", "load_inplace": True}
    plain, adapted = batch().groups
    groups = [plain, adapted.model_copy(update={"adapter": "poet"})]
    found = {group.prompt_id: group for group in client.rollout_blocking(batch(groups=groups))}
    digests = [{part.adapter_digest for one in found[name].samples for part in one.segments} for name in ("p0", "p1")]
    assert digests == [{""}, {"of /poet"}]
    assert [one.name for one in client.adapters_blocking()] == ["poet"]
    client.unload_adapter_blocking("poet")
    with pytest.raises(AdapterRejected, match="cannot be found"):
        client.unload_adapter_blocking("poet")
    with pytest.raises(UnknownAdapter, match="model 'poet' is not served"):
        client.open().generate_blocking((1,), adapter="poet")


def test_a_service_that_was_restarted_gets_the_client_s_adapter_again(gateway):
    client = gateway.client()
    client.load_adapter_blocking("poet", "/poet")
    gateway.adapters.clear()
    answer = client.open().generate_blocking((1,), adapter="poet")
    assert answer.sample.segments[0].adapter_digest == "of /poet" and gateway.adapters == {"poet": "/poet"}
    gateway.script = [refusal(400, "rank 64 is greater than max_lora_rank 16")]
    with pytest.raises(AdapterRejected, match="max_lora_rank"):
        client.load_adapter_blocking("clerk", "/clerk")


def test_weights_are_those_that_are_asked_for(gateway):
    client = gateway.client()
    with pytest.raises(RolloutRejected, match="weights_version 7 is asked for, and the service holds 0"):
        list(client.rollout_blocking(batch(weights_version=7)))
    with pytest.raises(RolloutRejected, match="holds weights 0, and 2 or higher"):
        client.open(min_weights_version=2).generate_blocking((1,))
    loaded = client.update_weights_blocking(7, "/weights/7")
    assert (loaded.version, loaded.digest, loaded.replicas) == (7, "d", ("replica-0",))
    assert loaded.set_aside == {"replica-1": "its score differs"}, "a trainer over HTTP is told, too"
    assert len(list(client.rollout_blocking(batch(weights_version=7)))) == 2
    gateway.version = 0  # restarted, on the weights of its configuration
    groups = list(client.rollout_blocking(batch()))
    assert {sample.token_ids[3] for group in groups for sample in group.samples} == {7}
    gateway.version = 0
    assert client.open(weights_version=7).generate_blocking((1,)).sample.token_ids[3] == 7
    assert set(gateway.sources) == {"/weights/7"}
    gateway.script = [refusal(400, "no such folder")]
    with pytest.raises(WeightsRejected, match="no such folder"):
        client.update_weights_blocking(8, "/nowhere")


def test_closing_an_iterator_or_the_client_ends_what_is_open():
    entered, ended, hold = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    async def answer(request):
        entered.release()
        try:
            await asyncio.sleep(0 if hold.is_set() else 3_600)
        finally:
            ended.release()
        return httpx.Response(200, json={"choices": []})

    async def leave(client):
        call = asyncio.ensure_future(client.open().generate((1,)))
        await asyncio.to_thread(entered.acquire)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    before = set(threading.enumerate())
    client = Client("http://gateway", transport=httpx.MockTransport(answer))
    (thread,) = set(threading.enumerate()) - before
    asyncio.run(leave(client))
    assert ended.acquire(timeout=60)

    async def closed_meanwhile():
        call = asyncio.ensure_future(client.open().generate((1,)))
        await asyncio.to_thread(entered.acquire)
        client.close()
        await asyncio.gather(call, return_exceptions=True)
        return call

    assert asyncio.run(closed_meanwhile()).cancelled() and ended.acquire(timeout=60)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        client.weight_info_blocking()


def test_a_client_that_is_forgotten_leaves_no_thread(gateway):
    before = set(threading.enumerate())
    client = gateway.client()
    (thread,) = set(threading.enumerate()) - before
    client.weight_info_blocking()
    assert thread.is_alive()
    del client
    assert not thread.is_alive()


def test_at_most_max_open_requests_are_open_and_connections_are_used_again(gateway, monkeypatch):
    open_now, most, made = 0, 0, []

    async def answer(request):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        return await gateway._answer(request)

    new = connections.Pool._new
    monkeypatch.setattr(connections.Pool, "_new", lambda pool: made.append(pool) or new(pool))
    client = Client("http://gateway", "a-token", max_open=5, transport=httpx.MockTransport(answer))

    async def story() -> int:
        session = client.open()
        for number in range(200):
            session.submit((1,), group=str(number))
        return len([answer async for answer in session.samples()])

    assert asyncio.run(story()) == 200 and most == len(made) == 5


def test_an_update_waits_for_no_sample(gateway):
    """It waited for the end of all samples that were asked for before; those of a service that sleeps wait for it."""
    updated = []

    async def answer(request):
        while request.url.path == "/v1/completions" and not updated:
            await asyncio.sleep(0.001)
        found = await gateway._answer(request)
        updated.extend([True] if request.url.path == "/update_weights" else [])
        return found

    client = Client("http://gateway", "a-token", max_open=1, transport=httpx.MockTransport(answer))

    async def story() -> int:
        async with asyncio.timeout(20):
            session = client.open()
            for number in range(3):
                session.submit((1,), group=str(number))
            await asyncio.sleep(0.05)
            await client.update_weights(1, "/w/1")
            return len([answer async for answer in session.samples()])

    assert asyncio.run(story()) == 3


def test_a_sample_that_began_under_other_weights_than_asked_for_is_refused(gateway):
    """The version was read before its request waited for its place, and not again."""

    async def answer(request):
        found = await gateway._answer(request)
        gateway.version = 1  # another client's update
        return found

    client = Client("http://gateway", "a-token", transport=httpx.MockTransport(answer))
    with pytest.raises(RolloutRejected, match="weights_version 0 is asked for, and the service holds 1"):
        client.open(weights_version=0).generate_blocking((1,))
    assert client.open(weights_version=1).generate_blocking((1,)).sample.token_ids[3] == 1


def test_samples_in_flight_keep_their_tokens_when_their_client_updates_the_weights(gateway):
    """They were thrown away and made again, after each update."""
    updated = []

    async def answer(request):
        found = await gateway._answer(request)  # under the weights before
        while request.url.path == "/v1/completions" and not updated:
            await asyncio.sleep(0.001)
        updated.extend([True] if request.url.path == "/update_weights" else [])
        return found

    client = Client("http://gateway", "a-token", transport=httpx.MockTransport(answer))

    async def story() -> list[int]:
        asking = asyncio.ensure_future(client.open().generate((1,), group="g"))
        while not gateway.seen:
            await asyncio.sleep(0.001)
        await client.update_weights(1, "/w/1")
        return [(await one).sample.token_ids[3] for one in (asking, client.open().generate((1,), group="g"))]

    assert asyncio.run(story()) == [0, 1]
    assert [path for path, _, _ in gateway.seen] == ["/v1/completions", "/update_weights", "/v1/completions"]


def test_a_full_gateway_ends_no_version_of_a_trainer_s_weights(monkeypatch):
    """One answer 429 ended the version for all ranks."""
    answers = [refusal(429, "2000 requests are open")] * 2 + [httpx.Response(200, json={"weight_version": "7"})]
    weights = HttpWeights("http://gateway")
    weights._gateway["transport"] = httpx.MockTransport(lambda request: answers.pop(0))
    monkeypatch.setattr(over_http, "FULL_PAUSE_S", 0.001)
    assert weights.next_version_blocking() == 7
    monkeypatch.setattr(over_http, "FULL_S", 0.0)
    answers.append(refusal(429, "2000 requests are open"))
    with pytest.raises(WeightsRejected, match="2000 requests are open"):
        weights.next_version_blocking()


@pytest.mark.parametrize("status", [401, 404])
def test_leaving_a_trajectory_that_has_ended_elsewhere_is_no_error(status):
    """Its limit of seconds, or who has its key, had ended it; then the way out hid the error of the block, too."""
    opened = {"id": "a", "base_url": "http://gateway/v1/trajectories/a", "api_key": "k"}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=opened) if request.url.path == "/v1/trajectories" else refusal(status, "ended")

    async def story():
        client = Client("http://gateway", transport=httpx.MockTransport(answer))
        with pytest.raises(ZeroDivisionError):
            async with await client.trajectory() as trajectory:
                raise ZeroDivisionError
        with pytest.raises((PermissionError, RolloutRejected), match="ended"):
            await trajectory.close()

    asyncio.run(story())


def test_a_harness_that_awaits_a_cancelled_task_ends_its_own_trajectory_alone():
    """The error passed for a cancel of the driver, whose loop ended with it."""
    closed = []

    class Played:
        async def close(self):
            closed.append(self)

    async def opened(group, index):
        return Played()

    async def play(trajectory, task):
        if task == "cancels":
            own = asyncio.ensure_future(asyncio.sleep(9))
            own.cancel()
            await own
        await asyncio.sleep(9 if task == "waits" else 0)

    async def story():
        groups = played_groups(opened, {"cancels": "cancels", "ends": "ends", "waits": "waits"}, play, 1, 9)
        found = {}
        async for one in groups:
            found[one.group] = one.trajectories[0].error
            if len(found) == 2:
                break
        await groups.aclose()
        assert found["ends"] is None and "cancelled by a task of its own" in str(found["cancels"]) and len(closed) == 3

    asyncio.run(story())


def test_a_rank_waits_for_the_others_as_long_as_it_says():
    """Beyond 900 s its join broke off, and ended the version for all ranks."""
    patience, loaded = [], WeightsLoaded(version=7, digest="d", replicas=("r",))

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/weights/7/loaded":
            return httpx.Response(200, json=told(loaded))
        patience.append((request.url.path, request.extensions["timeout"]["read"]))
        return httpx.Response(200, json={"upload": [], "max_body_bytes": 9, "deltas": False})

    weights = HttpWeights("http://gateway")
    weights._gateway["transport"] = httpx.MockTransport(answer)
    assert weights.publish_blocking(7, {}, 0, 2, timeout_s=2_000.0).version == 7
    ((path, seconds),) = patience
    assert path == "/weights/7/join" and seconds > 2_000
