"""The gateway's routes over the simulated cluster: streams, ends and errors, in virtual time."""

import asyncio
import json
from itertools import chain, cycle

import httpx
import pytest
from chatting_prompts import ChattingPrompts
from prometheus_client.parser import text_string_to_metric_families
from virtual_cluster import play as play_on
from virtual_cluster import play_gateway

from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService, ServedModel
from tailrace.deployments.batches.quotas import Quotas
from tailrace.deployments.messages.roles import Role
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.token_law import EOS, VOCABULARY

PROMPT = [5, 6, 7]
CHUNKS = {"policies": {"chunking": {"type": "fixed", "chunk_tokens": 20}}}


@pytest.fixture
def play(tmp_path):
    """Runs a story with the gateway over a cluster of two replicas, and looks for leftovers after it."""

    def run(story, **sizes):
        async def with_gateway(cluster, client):
            service = GatewayService(lambda role: driver_client(cluster), GatewayConfig())
            service._model = ServedModel("simulated", "simulated", 512, ChattingPrompts())
            app = make_app(service, GatewayConfig())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
                await story(cluster, http, app)

        play_on(with_gateway, tmp_path, **({"mean_tokens": 60} | CHUNKS | sizes))

    return run


async def answered(http, path: str, **body) -> dict:
    answer = await http.post(path, json={"seed": 3} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events_of(http, path: str, **body) -> list[dict]:
    answer = await http.post(path, json={"seed": 3, "stream": True} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def choices_of(events: list[dict], index: int = 0) -> list[dict]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def given(message: dict) -> dict:
    return {name: value for name, value in message.items() if value is not None}


def flat(pieces) -> list:
    return list(chain.from_iterable(pieces))


def test_equal_prompts_of_a_request_are_samples_of_one_group(play):
    async def story(cluster, http, app):
        asked = {"max_tokens": 90, "return_token_ids": True}
        batch = await answered(http, "/v1/completions", prompt=[PROMPT, [8, 9], PROMPT, PROMPT], n=2, **asked)
        one = await answered(http, "/v1/completions", prompt=PROMPT, n=6, **asked)
        found = [(choice["tailrace"]["index"], choice["token_ids"]) for choice in batch["choices"]]
        alone = [(choice["tailrace"]["index"], choice["token_ids"]) for choice in one["choices"]]
        assert [*found[:2], *found[4:]] == alone and [index for index, _ in alone] == list(range(3, 9))
        assert [index for index, _ in found[2:4]] == [3, 4] and len({str(tokens) for _, tokens in found}) == 8

    play(story)


def test_a_streamed_completion_is_the_whole_one_in_pieces(play):
    async def story(cluster, http, app):
        asked = {"prompt": PROMPT, "max_tokens": 90, "n": 2, "logprobs": 1, "return_token_ids": True}
        whole = await answered(http, "/v1/completions", **asked)
        events = await events_of(http, "/v1/completions", **asked, stream_options={"include_usage": True})
        assert {(event["id"], event["object"]) for event in events} == {(events[0]["id"], "text_completion")}
        assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
        assert not [event for event in events[:-1] if "usage" in event]
        for expected in whole["choices"]:
            first, *pieces, last = choices_of(events, expected["index"])
            assert first["prompt_token_ids"] == PROMPT and len(pieces) > 1
            assert "".join(one["text"] for one in (*pieces, last)) == expected["text"]
            assert flat(one["token_ids"] for one in (*pieces, last)) == expected["token_ids"]
            for name, values in expected["logprobs"].items():
                assert flat(one["logprobs"][name] for one in (*pieces, last)) == values
            for name in ("finish_reason", "stop_reason", "tailrace", "weight_versions"):
                assert last[name] == expected[name]
        order = [choice["index"] for event in events for choice in event["choices"]]
        assert order != sorted(order), "choices come interleaved"

    play(story, mean_tokens=400)


def test_the_usage_of_an_event_counts_its_prompt_once_whichever_choice_begins(play):
    async def story(cluster, http, app):
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = {"prompt": PROMPT, "max_tokens": 20, "n": 3, "return_token_ids": True, "stream_options": options}
        first_choices, waits = set(), cycle((0.0, 0.0, 0.0, 0.4))  # of three samples at a time, another one is late
        context = cluster.coordinator.rollouts.context
        lengths = context.lengths

        async def late(keys):
            await asyncio.sleep(next(waits))
            return await lengths(keys)

        context.lengths = late
        for seed in range(4):
            events = await events_of(http, "/v1/completions", **asked | {"seed": seed})
            first_choices.add(events[0]["choices"][0]["index"])
            assert {event["usage"]["prompt_tokens"] for event in events} == {len(PROMPT)}
        assert first_choices != {0}, "also another choice than the first begins"

    play(story)


def test_a_streamed_chat_is_the_whole_one_in_pieces(play):
    async def story(cluster, http, app):
        asked = {"messages": [{"role": "user", "content": "5 6"}], "max_tokens": 70, "logprobs": True}
        whole = await answered(http, "/v1/chat/completions", **asked, return_token_ids=True)
        (expected,) = whole["choices"]
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await events_of(http, "/v1/chat/completions", **asked, return_token_ids=True, stream_options=options)
        first, *pieces, last = choices_of(events)
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [3, 5, 6, EOS, 4]
        text = "".join(one["delta"].get("content", "") for one in (*pieces, last))
        assert {"role": "assistant", "content": text} == given(expected["message"])
        assert flat(one["token_ids"] for one in (*pieces, last)) == expected["token_ids"]
        assert flat(one["logprobs"]["content"] for one in (*pieces, last)) == expected["logprobs"]["content"]
        assert last["finish_reason"] == expected["finish_reason"]
        used = [event["usage"]["completion_tokens"] for event in events]
        *used, whole_use = used
        assert used == sorted(set(used)) and used[-1] == whole_use and events[-1]["usage"] == whole["usage"]

    play(story)


def test_streamed_token_ids_are_the_whole_ones_in_pieces(play):
    async def story(cluster, http, app):
        sampling = {"max_tokens": 90, "n": 2, "seed": 3, "logprobs": 1, "top_k": 5, "sampling_mask": True}
        asked = {"token_ids": PROMPT, "sampling_params": sampling, "return_token_ids": True}
        whole = (await http.post("/inference/v1/generate", json=asked)).json()
        answer = await http.post(
            "/inference/v1/generate", json=asked | {"stream": True, "stream_options": {"include_usage": True}}
        )
        events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
        assert events[0]["prompt_token_ids"] == PROMPT and events[-1]["usage"] == whole["usage"]
        for expected in whole["choices"]:
            pieces = choices_of(events, expected["index"])
            assert flat(piece["token_ids"] for piece in pieces) == expected["token_ids"] and len(pieces) > 3
            contents = flat(piece["logprobs"]["content"] for piece in pieces if piece["logprobs"])
            assert contents == expected["logprobs"]["content"]
            likeliest = [[(top["token_id"], top["logprob"]) for top in one["top_logprobs"]] for one in contents]
            assert likeliest == [[(one["token_id"], one["logprob"])] for one in contents], "its own, as in vLLM"
            masks = flat(piece["sampling_mask"] for piece in pieces if piece.get("sampling_mask"))
            assert masks == expected["sampling_mask"] == [[token, VOCABULARY] for token in expected["token_ids"]]
            assert pieces[-1]["weight_versions"] == expected["weight_versions"]
            assert pieces[-1]["token_ids"] and all(piece["token_ids"] for piece in pieces[1:]), (
                "the first has the prompt"
            )

    play(story, mean_tokens=400)


def test_a_request_that_no_quota_will_ever_hold_is_not_to_be_made_again(play):
    async def story(cluster, http, app):
        await http.get("/health")
        cluster.coordinator.rollouts.deliveries.quotas = Quotas(max_samples=4, max_tokens=400)
        asked = {"prompt": [PROMPT, [8]], "max_tokens": 20}
        for more, reason in (({"n": 3}, "6 samples, quotas.max_samples is 4"), ({"max_tokens": 201}, "402 tokens")):
            for stream in (False, True):
                refused = await http.post("/v1/completions", json=asked | more | {"stream": stream})
                assert refused.status_code == 400 and "retry-after" not in refused.headers
                error = refused.json()["error"]
                assert f"has {reason}" in error["message"] and error["type"] == "TooLargeForQuota"
        long = asyncio.ensure_future(answered(http, "/v1/completions", prompt=PROMPT, max_tokens=300))
        await asyncio.sleep(1.0)
        refused = await http.post("/v1/completions", json=asked | {"n": 2})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        await long
        assert len((await answered(http, "/v1/completions", **asked, n=2))["choices"]) == 4

    play(story, mean_tokens=10_000)


def test_metrics_count_requests_by_route_and_refusals_by_reason(tmp_path):
    async def story(cluster, http):
        async with http(Role.EVALUATOR) as evaluator, http(None) as stranger:
            long = asyncio.ensure_future(
                evaluator.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 300, "seed": 3})
            )
            await asyncio.sleep(1.0)
            for path, body in (("/v1/completions", {"prompt": ""}), ("/sleep", None), ("/nowhere", None)):
                await evaluator.post(path, json=body)
            assert (await stranger.get("/metrics")).status_code == 401
            text = (await evaluator.get("/metrics")).text
            await long
            last = (await evaluator.get("/metrics")).text
        samples = {
            (one.name, *(value for name, value in sorted(one.labels.items()) if name != "replica")): one.value
            for family in text_string_to_metric_families(text)
            for one in family.samples
        }
        assert samples["tailrace_gateway_open_requests",] == 2.0, "the long one, and this one"
        requests, refused = "tailrace_gateway_requests_total", "tailrace_gateway_refused_total"
        assert samples[requests, "/v1/completions", "400"] == samples[requests, "/sleep", "403"] == 1.0
        assert samples[requests, "none", "404"] == samples[requests, "none", "401"] == 1.0
        assert {one[1]: value for one, value in samples.items() if one[0] == refused and value} == {
            "content": 1.0, "role": 1.0, "route": 1.0, "token": 1.0
        }  # fmt: skip
        assert samples["tailrace_gateway_request_seconds_count", "/sleep"] == 1.0
        assert 'route="/v1/completions",status="200"' in last and "nowhere" not in last

    play_gateway(story, tmp_path, mean_tokens=10_000)


def test_a_gateway_that_returns_masks_needs_a_bound_of_each(tmp_path):
    async def story(cluster, client):
        config = GatewayConfig(return_sampling_mask=True)
        service = GatewayService(lambda role: driver_client(cluster), config)
        service._model = ServedModel("simulated", "simulated", 512, ChattingPrompts())
        transport = httpx.ASGITransport(make_app(service, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            for sampling, status in (({}, 400), ({"top_k": 5}, 200)):
                asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "seed": 3} | sampling}
                answer = await http.post("/inference/v1/generate", json=asked)
                assert answer.status_code == status
                if status == 400:
                    assert "sampling_mask: give a top_k" in answer.json()["error"]["message"]
                else:
                    assert len(answer.json()["choices"][0]["sampling_mask"]) == 4
            plain = await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
            assert plain.status_code == 200 and "sampling_mask" not in plain.json()["choices"][0]

    play_on(story, tmp_path, mean_tokens=400)


def test_the_end_of_an_answer_is_named(play):
    async def story(cluster, http, app):
        asked = {"prompt": PROMPT, "max_tokens": 300, "return_token_ids": True}
        (whole,) = (await answered(http, "/v1/completions", **asked))["choices"]
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", None) and whole["token_ids"][-1] == EOS
        assert whole["text"] == " ".join(map(str, whole["token_ids"][:-1])), "the end of sequence is no text"
        (cut,) = (await answered(http, "/v1/completions", **asked | {"max_tokens": len(whole["token_ids"]) - 1}))[
            "choices"
        ]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("length", None)
        assert cut["text"] == " ".join(map(str, cut["token_ids"]))
        (ended,) = (await answered(http, "/v1/completions", **asked, stop_token_ids=[EOS]))["choices"]
        assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", EOS)

    play(story)


def test_a_refusal_comes_before_the_first_event_and_an_error_midway_is_one(play):
    async def story(cluster, http, app):
        body = {"prompt": [1] * 600, "stream": True}
        refused = await http.post("/v1/completions", json=body)
        assert (
            refused.status_code == 400 and "maximum context length is 512 tokens" in refused.json()["error"]["message"]
        )
        asked = asyncio.ensure_future(events_of(http, "/v1/completions", prompt=PROMPT, max_tokens=400))
        await asyncio.sleep(4.0)
        cluster.coordinator.rollouts._restart_core("test", RuntimeError("a policy's own"))
        *_, error = await asked
        assert error["error"]["code"] == 400 and "ended by an error" in error["error"]["message"]

    play(story, mean_tokens=5_000, step_tokens=1)


def test_a_client_that_hangs_up_midway_ends_its_samples(play):
    async def story(cluster, http, app):
        body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "stream": True, "n": 3}).encode()
        came, leaves = [], asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict:
            if messages:
                return messages.pop()
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            came.append(message)
            if message["type"] == "http.response.body" and len(came) > 3:
                leaves.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        scope["headers"] = [(b"content-type", b"application/json")]
        await app(scope, receive, send)
        assert came[0]["status"] == 200 and not came[-1]["body"].endswith(b"[DONE]\n\n")
        await asyncio.sleep(3.0)
        assert cluster.coordinator.rollouts.books()["running"] == 0

    play(story, mean_tokens=5_000, step_tokens=1)


def test_the_next_turn_goes_on_from_the_tokens_of_the_last_answer(play):
    async def story(cluster, http, app):
        asked = {"max_tokens": 300, "return_token_ids": True}
        messages, before = [{"role": "user", "content": "5 6"}], []
        for streams in (False, True, False):
            if streams:
                events = await events_of(http, "/v1/chat/completions", messages=messages, **asked)
                choices = choices_of(events)
                prompt, ids = events[0]["prompt_token_ids"], flat(one.get("token_ids", []) for one in choices)
                message = {"role": "assistant", "content": "".join(one["delta"].get("content", "") for one in choices)}
            else:
                answer = await answered(http, "/v1/chat/completions", messages=messages, **asked)
                (choice,) = answer["choices"]
                prompt, ids, message = answer["prompt_token_ids"], choice["token_ids"], choice["message"]
            messages = [*messages, message | {"refusal": None}, {"role": "user", "content": "8"}]
            assert ids[-1] == EOS and (not before or prompt == [*before, 3, 8, EOS, 4])
            before = [*prompt, *ids]

    play(story)


def test_turns_over_http_have_the_tokens_of_a_session_s_turns_and_are_held_between(play):
    async def story(cluster, http, app):
        context, outside, held = list(PROMPT), [[8, 9], []], []
        for turn, more in enumerate(outside):
            headers = {"x-tailrace-group": "task", "x-tailrace-index": "2", "x-tailrace-turn": str(turn)}
            headers["x-tailrace-hold"] = "30" if turn == 0 else "0"
            body = {"prompt": context, "max_tokens": 20, "return_token_ids": True, "stop_token_ids": [EOS]}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            choice = answer.json()["choices"][0]
            assert choice["tailrace"]["turn"] == turn
            held.append(cluster.coordinator.rollouts.status().held)
            context += choice["token_ids"] + more
        assert held == [1, 0]
        async with driver_client(cluster).open() as session:
            asked = {"group": "task", "index": 2, "max_tokens": 20, "sampling": {"stop_token_ids": [EOS]}}
            expected = list(PROMPT)
            for turn, more in enumerate(outside):
                found = await session.generate(tuple(expected), turn=turn, **asked)
                expected += [*found.sample.token_ids, *more]
        assert expected == context

    play(story)


def test_prompt_logprobs_are_by_position_and_by_token(play):
    async def story(cluster, http, app):
        body = await answered(http, "/v1/completions", prompt=PROMPT, max_tokens=1, prompt_logprobs=0)
        positions = body["choices"][0]["prompt_logprobs"]
        assert positions[0] is None and [list(one) for one in positions[1:]] == [["6"], ["7"]]
        assert positions[2]["7"] == {"logprob": -2.0, "rank": 2, "decoded_token": "7"}
        sampling = {"max_tokens": 1, "prompt_logprobs": 1}
        tokens = await http.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling})
        assert tokens.json()["prompt_logprobs"] == positions
        refused = await http.post("/v1/completions", json={"prompt": PROMPT, "prompt_logprobs": 1, "stream": True})
        assert refused.status_code == 400 and "prompt_logprobs: not with stream" in refused.text

    play(story)
