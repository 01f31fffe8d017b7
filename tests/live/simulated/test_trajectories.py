"""Trajectories over the simulated cluster: unmodified clients with a base URL and a key alone, and their rows."""

import asyncio
import json
from itertools import product

import anthropic
import httpx
import httpx2
import openai
import pytest
from chatting_prompts import ChattingPrompts
from openai.types.responses import ResponseErrorEvent
from virtual_cluster import play as play_on

from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService, ServedModel
from tailrace.app.gateway.trajectories.trajectories import GatewayTrajectories
from tailrace.app.http.client import Client
from tailrace.deployments.batches.trajectories import Trajectories as Book
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.token_law import EOS

URL = "http://gateway/v1/trajectories"


@pytest.fixture
def play(tmp_path):
    """Runs a story with gateways over a cluster: `story(cluster, http, other)`."""

    def run(story, **sizes):
        async def with_gateways(cluster, client):
            def gateway() -> httpx.AsyncClient:
                service = GatewayService(lambda role: driver_client(cluster), GatewayConfig())
                service._model = ServedModel("simulated", "simulated", 512, ChattingPrompts())
                return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service, GatewayConfig())))

            async with gateway() as http, gateway() as other:
                await story(cluster, http, other)

        play_on(with_gateways, tmp_path, **({"mean_tokens": 20} | sizes))

    return run


async def opened(http, **body) -> dict:
    answer = await http.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def client_of(http, trajectory: dict) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=trajectory["base_url"], api_key=trajectory["api_key"], http_client=http, max_retries=0
    )


async def said(client, messages: list[dict], stream: bool = False, **more) -> list[dict]:
    """The conversation after one more answer, as a harness keeps it."""
    asked = client.chat.completions.create(model="any-model", messages=messages, **more)
    if not stream:
        return [*messages, (await asked).choices[0].message.model_dump(exclude_none=True)]
    text = ""
    async for event in await client.chat.completions.create(model="any-model", messages=messages, stream=True, **more):
        text += event.choices[0].delta.content or "" if event.choices else ""
    asked.close()
    return [*messages, {"role": "assistant", "content": text}]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def read(http, trajectory: dict) -> dict:
    headers = {"Authorization": f"Bearer {trajectory['api_key']}"}
    answer = await http.get(f"{URL}/{trajectory['id']}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def is_gone(http, trajectory: dict) -> bool:
    """Whether a gateway knows it no longer, or its key neither."""
    headers = {"Authorization": f"Bearer {trajectory['api_key']}"}
    return (await http.get(f"{URL}/{trajectory['id']}", headers=headers)).status_code in (401, 404)


async def rewarded(http, trajectory: dict, reward: float = 1.0) -> dict:
    headers = {"Authorization": f"Bearer {trajectory['api_key']}"}
    answer = await http.post(f"{URL}/{trajectory['id']}/reward", json={"reward": reward}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_turns_of_an_openai_client_are_one_row_whole_or_streamed(play):
    async def story(cluster, http, other):
        found = []
        for stream in (False, True):
            trajectory = await opened(http, group="task", index=3, seed=9)
            client = client_of(http, trajectory)
            messages = [user("5 6")]
            for word in ("7", "8", "9"):
                messages = await said(client, messages, stream)
                messages.append(user(word))
            body = await rewarded(http, trajectory)
            (row,) = body["rows"]
            assert body["turns"] == 3 and body["branches"] == body["reencoded_tokens"] == 0 and body["reward"] == 1.0
            assert [one["parent"] for one in row["turns"]] == [None, 0, 1]
            assert len(row["token_ids"]) == len(row["mask"]) == len(row["logprobs"]) == row["turns"][-1]["end"]
            sampled = [place for one in row["turns"] for place in range(one["start"], one["end"])]
            assert [place for place, one in enumerate(row["mask"]) if one] == sampled
            assert all(row["logprobs"][place] < 0.0 for place in sampled) and sum(row["mask"]) == body["sampled_tokens"]
            assert row["token_ids"][:5] == [3, 5, 6, EOS, 4]
            for turn in row["turns"][:-1]:
                assert row["token_ids"][turn["end"] - 1] == EOS, "an end is sampled, and not encoded again"
                assert row["token_ids"][turn["end"]] == 3
                assert [one["version"] for one in turn["weight_versions"]] == [0]
            found.append(row)
        assert found[0] == found[1], "under the same names they have the same tokens"

    play(story)


def test_a_trainer_s_sampling_holds_whatever_the_harness_asks_for(play, monkeypatch):
    asked, generate = [], GatewayService.generate

    async def noted(self, role, wanted, naming):
        asked.append(wanted.sampling)
        return await generate(self, role, wanted, naming)

    monkeypatch.setattr(GatewayService, "generate", noted)

    async def story(cluster, http, other):
        own = await opened(http, sampling={"temperature": 1.0, "top_k": 9})
        await said(client_of(http, own), [user("5 6")], temperature=0.0, top_p=0.5, presence_penalty=1.0)
        free = await opened(other)
        await said(client_of(other, free), [user("5 6")], temperature=0.0)
        mine, theirs = asked
        assert (mine.temperature, mine.top_k, mine.top_p, mine.presence_penalty) == (1.0, 9, 0.5, 1.0)
        assert theirs.temperature == 0.0
        formed = await opened(http, sampling={"structured_outputs": {"regex": "yes|no"}})
        with pytest.raises(openai.BadRequestError, match="remove ignore_eos and min_tokens"):
            await said(client_of(http, formed), [user("5 6")], extra_body={"min_tokens": 3})
        for trajectory in (own, free, formed):
            await rewarded(http, trajectory)

    play(story)


def test_a_prompt_that_does_not_continue_is_a_branch_and_each_token_is_trained_once(play):
    async def story(cluster, http, other):
        trajectory = await opened(http, group="task", index=0, seed=4)
        client = client_of(http, trajectory)
        first = await said(client, [user("5 6")])
        await said(client, [*first, user("7")])
        await said(client, [*first, user("8")])  # from the first answer
        same, again = await asyncio.gather(*(said(client, [user("9")]) for _ in range(2)))  # a sub-agent, twice
        assert same != again
        edited = [user("5 6 6"), *first[1:], user("7")]  # the answer as text of another conversation
        await said(client, edited)
        body = await rewarded(http, trajectory)
        assert body["turns"] == 6 and len(body["rows"]) == 5 and body["branches"] == 4
        assert sum(sum(row["mask"]) for row in body["rows"]) == body["sampled_tokens"]
        one, two = body["rows"][:2]
        start, end = one["turns"][0]["start"], one["turns"][0]["end"]
        assert one["token_ids"][:end] == two["token_ids"][:end]
        assert all(one["mask"][start:end]) and not any(two["mask"][start:end])
        assert body["reencoded_tokens"] == end - start, "the edited conversation's"

    play(story)


def test_completions_of_token_ids_continue_branch_and_have_a_chat_s_rows(play):
    async def story(cluster, http, other):
        rows = []
        for stream in (False, True):
            trajectory = await opened(http, group="task", index=3, seed=9)
            client = client_of(http, trajectory)

            async def made(prompt, stream=stream, client=client) -> list[int]:
                asked = {"model": "any", "prompt": prompt, "max_tokens": 100, "extra_body": {"return_token_ids": True}}
                if not stream:
                    return (await client.completions.create(**asked)).choices[0].token_ids
                events = await client.completions.create(stream=True, **asked)
                return [token async for event in events for one in event.choices for token in one.token_ids]

            first = await made([3, 5, 6, EOS, 4])
            await made([3, 5, 6, EOS, 4, *first, 7])
            await made([3, 5, 6, EOS, 4, *first, 8])
            body = await rewarded(http, trajectory)
            one, two = body["rows"]
            assert body["turns"] == 3 and body["branches"] == 1 and body["reencoded_tokens"] == 0
            assert one["token_ids"][: 5 + len(first)] == two["token_ids"][: 5 + len(first)] == [3, 5, 6, EOS, 4, *first]
            rows.append(body["rows"])
        chat = await opened(http, group="task", index=3, seed=9)
        await said(client_of(http, chat), [user("5 6")])
        (row,) = (await rewarded(http, chat))["rows"]
        assert rows[0] == rows[1] and row["token_ids"] == rows[0][0]["token_ids"][: len(row["token_ids"])]

    play(story)


def test_a_text_that_may_repeat_answers_is_refused(play):
    async def story(cluster, http, other):
        trajectory = await opened(http)
        key = {"Authorization": f"Bearer {trajectory['api_key']}"}

        async def status(**body) -> tuple[int, str]:
            answer = await http.post(f"{trajectory['base_url']}/completions", json=body, headers=key)
            return answer.status_code, answer.text

        assert (await status(prompt="5 6"))[0] == 200
        for wrong, name in (({"prompt": "5 6 7"}, "prompt: "), ({"prompt": [5], "n": 2}, "n: ")):
            code, text = await status(**wrong)
            assert code == 400 and name in text
        assert (await status(prompt=[[5], [6]]))[0] == 400
        await rewarded(http, trajectory)

    play(story)


def test_another_gateway_goes_on_and_so_does_this_one_after_a_lost_coordinator(play):
    async def story(cluster, http, other):
        trajectory = await opened(http, seed=2)
        messages = await said(client_of(http, trajectory), [user("5")])
        messages = await said(client_of(other, trajectory), [*messages, user("6")])
        messages = await said(client_of(http, trajectory), [*messages, user("7")])
        cluster.coordinator.rollouts.trajectories = Book("another", lambda: 0.0, cluster.coordinator.rollouts.sessions)
        messages = await said(client_of(http, trajectory), [*messages, user("8")])
        messages = await said(client_of(other, trajectory), [*messages, user("9")])
        body = await rewarded(other, trajectory)
        assert len(body["rows"]) == 1 and body["turns"] == 5
        for one in (http, other):
            assert await is_gone(one, trajectory)

    play(story)


def test_a_key_opens_its_own_trajectory_and_nothing_else(play):
    async def story(cluster, http, other):
        mine, theirs = await opened(http), await opened(http)
        for key in (theirs["api_key"], "tj-wrong", ""):
            for gateway in (http, other):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                assert (await gateway.get(f"{URL}/{mine['id']}", headers=headers)).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            await said(client_of(http, mine | {"api_key": theirs["api_key"]}), [user("5")])
        for name in ("0" * 32, "%2e%2e", "x", ""):
            headers = {"x-api-key": mine["api_key"]}
            assert (await http.get(f"{URL}/{name}/models", headers=headers)).status_code in (401, 404)
        assert (await http.get(f"{URL}/{mine['id']}/models", headers=headers)).status_code == 200
        for one in (mine, theirs):
            await rewarded(http, one)
            assert await is_gone(http, one)

    play(story)


def test_a_key_that_cannot_be_checked_while_the_service_is_away_is_answered_and_counted_as_503(play, monkeypatch):
    """It was counted as 500, with a stack trace in the log for each request."""

    async def away(*_):
        raise ConnectionError("the coordinator is away")

    async def story(cluster, http, other):
        trajectory = await opened(http)
        monkeypatch.setattr(GatewayTrajectories, "_read", away)
        headers = {"Authorization": f"Bearer {trajectory['api_key']}"}
        answer = await other.get(f"{URL}/{trajectory['id']}", headers=headers)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["message"] == "the coordinator is away"
        metrics = other._transport.app.state.metrics
        assert metrics._requests == {("none", "503"): 1} and metrics._refused[("away",)] == 1
        monkeypatch.undo()
        await rewarded(http, trajectory)

    play(story)


def test_limits_refuse_a_turn_in_one_line_and_time_drops_all(play):
    async def story(cluster, http, other):
        limits = ({"turns": 1}, "limits.turns"), ({"tokens": 3}, "limits.tokens"), ({"branches": 0}, "limits.branches")
        for given, name in limits:
            trajectory = await opened(http, limits=given, group=name, index=1, seed=6)
            client = client_of(http, trajectory)
            messages = await said(client, [user("5")])
            if name == "limits.tokens":
                assert (await read(http, trajectory))["sampled_tokens"] <= 3
            with pytest.raises(openai.BadRequestError, match=name):
                await said(client, [user("6")])
                await said(client, [*messages, user("6")])
            await rewarded(http, trajectory)
        short = await opened(http, limits={"seconds": 5.0})
        await said(client_of(http, short), [user("5")])
        await asyncio.sleep(6.0)
        assert await is_gone(http, short)
        refused = await http.post(URL, json={"limits": {"turns": 0}})
        assert refused.status_code == 400 and "limits.turns" in refused.text
        with pytest.raises(openai.BadRequestError, match="n: 2 answers"):
            trajectory = await opened(http)
            try:
                await said(client_of(http, trajectory), [user("5")], n=2)
            finally:
                await rewarded(http, trajectory)

    play(story)


def test_a_client_that_leaves_midway_leaves_no_turn(play):
    async def story(cluster, http, other):
        trajectory = await opened(http)
        asking = asyncio.ensure_future(said(client_of(http, trajectory), [user("5")], max_tokens=300))
        await asyncio.sleep(2.0)
        asking.cancel()
        await asyncio.sleep(3.0)
        assert (await rewarded(http, trajectory))["rows"] == []

    play(story, mean_tokens=10_000)


def test_anthropics_client_makes_the_same_turns(play):
    async def story(cluster, http, other):
        expected = None
        for dialect in ("openai", "whole", "streamed"):
            trajectory = await opened(http, seed=5, group="g")
            second = httpx2.AsyncClient(transport=httpx2.ASGITransport(http._transport.app))
            client = anthropic.AsyncAnthropic(
                base_url=trajectory["base_url"], api_key=trajectory["api_key"], http_client=second, max_retries=0
            )
            messages = [user("5 6")]
            for word in ("7", "8"):
                thinking = {"type": "enabled", "budget_tokens": 2_000}
                asked = {"model": "claude", "max_tokens": 8_000, "messages": messages, "thinking": thinking}
                if dialect == "openai":
                    messages = await said(client_of(http, trajectory), messages)
                elif dialect == "whole":
                    counted = await client.messages.count_tokens(model="claude", messages=messages)
                    answer = await client.messages.create(**asked)
                    assert answer.usage.input_tokens == counted.input_tokens and answer.stop_reason == "end_turn"
                    messages = [*messages, {"role": "assistant", "content": answer.content}]
                else:
                    async with client.messages.stream(**asked) as stream:
                        answer = await stream.get_final_message()
                    assert answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0
                    messages = [*messages, {"role": "assistant", "content": answer.content}]
                messages = [*messages, user(word)]
            body = await rewarded(http, trajectory)
            expected = expected or body["rows"]
            assert body["rows"] == expected and len(expected) == 1 and body["turns"] == 2
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="claude", max_tokens=3, messages=[user("5")])
        trajectory = await opened(http)
        headers = {"Authorization": f"Bearer {trajectory['api_key']}"}
        asked = {"model": "claude", "max_tokens": 3, "messages": [user("5")]}
        refused = {"thread": {"type": "create"}}, {"compaction": {"type": "enabled"}}
        for path, more in product(("/messages", "/messages/count_tokens"), refused):
            answer = await http.post(f"{trajectory['base_url']}{path}", json=asked | more, headers=headers)
            (name,) = more
            assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{name}: ")
            is_known = answer.json()["error"].get("details", {}).get("error_code") == "thread_unsupported_request"
            assert is_known == (name == "thread"), "by this Anthropic's clients send whole conversations"
        assert (await rewarded(http, trajectory))["turns"] == 0

    play(story)


def test_responses_go_on_by_their_ids_or_by_their_items(play):
    async def story(cluster, http, other):
        expected = None
        for dialect in ("openai", "ids", "items", "streamed ids", "streamed items"):
            trajectory = await opened(http, seed=5, group="g")
            client, items, previous = client_of(http, trajectory), [user("5 6")], None
            messages = items
            for word in ("7", "8", "9"):
                if dialect == "openai":
                    messages = [*await said(client, messages), user(word)]
                    continue
                asked = {"model": "gpt", "input": items, "previous_response_id": previous}
                if dialect.startswith("streamed"):
                    async with client.responses.stream(**{k: v for k, v in asked.items() if v}) as stream:
                        answer = await stream.get_final_response()
                else:
                    answer = await client.responses.create(**asked)
                assert answer.status == "completed" and answer.usage.output_tokens > 0 and answer.output_text
                if dialect.endswith("ids"):
                    previous, items = answer.id, word
                else:
                    items = [*items, *(one.model_dump(exclude_none=True) for one in answer.output), user(word)]
            if previous:
                with pytest.raises(openai.NotFoundError, match="previous_response_id"):
                    await client.responses.create(model="gpt", input="5", previous_response_id="resp_none")
            body = await rewarded(http, trajectory)
            expected = expected or body["rows"]
            assert body["rows"] == expected and len(expected) == 1 and body["turns"] == 3, dialect

    play(story)


def test_a_response_s_id_is_the_gateway_s_own(play):
    """With one id of the client's for all responses, the second one followed itself for ever."""

    async def story(cluster, http, other):
        trajectory, previous = await opened(http, seed=5, group="g"), None
        client = client_of(http, trajectory)
        for word in ("5", "6", "7"):
            named = {"previous_response_id": previous} if previous else {}
            answer = await client.responses.create(model="gpt", input=word, extra_body={"request_id": "own"}, **named)
            assert answer.id not in ("own", previous)
            previous = answer.id
        body = await rewarded(http, trajectory)
        assert body["turns"] == 3 and len(body["rows"]) == 1

    play(story)


def test_a_response_that_breaks_off_ends_in_an_error_event(play):
    """Its type was that of the error, which is no event of OpenAI's, so that clients saw an end without a reason."""

    async def story(cluster, http, other):
        trajectory = await opened(http)
        asked = {"model": "gpt", "input": "5", "max_output_tokens": 400, "stream": True}
        headers = {"Authorization": f"Bearer {trajectory['api_key']}"}
        asking = asyncio.ensure_future(http.post(f"{trajectory['base_url']}/responses", json=asked, headers=headers))
        await asyncio.sleep(3.0)
        await rewarded(other, trajectory)
        lines = (await asking).text.split("\n\n")[:-1]
        events = [json.loads(line.partition("\ndata: ")[2]) for line in lines]
        assert [one["sequence_number"] for one in events] == list(range(len(lines))) and len(lines) > 3
        last = ResponseErrorEvent.model_validate(events[-1], strict=True)
        assert lines[-1].startswith("event: error\n") and last.code == "NotFoundError"
        assert last.message.startswith("trajectory ") and last.message.endswith("it has ended")

    play(story, mean_tokens=10_000)


def test_groups_come_whole_and_a_harness_s_error_is_its_trajectory_s_alone(play):
    async def story(cluster, http, other):
        client, playing = Client("http://gateway", transport=http._transport), []

        async def harness(trajectory, words: str) -> float | None:
            playing.append(words)
            number = playing.count(words)
            agent = client_of(http, {"base_url": trajectory.base_url, "api_key": trajectory.api_key})
            await said(agent, [user(words)])
            if words == "7" and number == 2:
                raise ZeroDivisionError("a tool's")
            return None if words == "8" else 0.5

        tasks = {"one": "5 6", "two": "7", "three": "8"}
        found = {one.group: one async for one in client.trajectory_groups(tasks, harness, 2, at_once=2, seed=3)}
        assert found.keys() == tasks.keys()
        for name, group in found.items():
            for index, one in enumerate(group.trajectories):
                assert (one.index, one.rows.index, one.rows.group, one.rows.turns) == (index, index, name, 1)
        assert {one.rows.reward for one in found["one"].trajectories} == {0.5}
        assert {one.rows.reward for one in found["three"].trajectories} == {None}
        assert [type(one.error) for name in ("one", "three") for one in found[name].trajectories] == [type(None)] * 4
        assert sum(isinstance(one.error, ZeroDivisionError) for one in found["two"].trajectories) == 1

        playing.clear()

        async def never(trajectory, words):
            playing.append(words)
            await asyncio.sleep(3600)

        groups = client.trajectory_groups(tasks, never, 1)
        waiting = asyncio.ensure_future(anext(groups))
        while len(playing) < 3:
            await asyncio.sleep(1)
        assert len(cluster.coordinator.rollouts.trajectories) == 3
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await groups.aclose()
        assert not len(cluster.coordinator.rollouts.trajectories)
        with pytest.raises(Exception, match="limits"):
            _ = [one async for one in client.trajectory_groups(tasks, never, 1, limits={"turns": 0})]

    play(story)


def test_lines_of_a_tree_stay_held_beside_each_other_until_the_trajectory_ends(play):
    """Far beyond the lease of a session; then nothing of it is left, its prompts' group neither."""

    async def story(cluster, http, other):
        trajectory = await opened(http, group="task", index=0)
        client, rollouts = client_of(http, trajectory), cluster.coordinator.rollouts
        main = [*await said(client, [user("5 6")]), user("7")]
        side = [*await said(client, [user("8 9")]), user("7")]
        main = [*await said(client, main), user("8")]
        await said(client, side)
        assert rollouts.core.counts()["held"] == 2 == len(rollouts.core.samples()), (
            "each turn has continued its own line"
        )
        await asyncio.sleep(600.0)
        assert rollouts.core.counts()["held"] == 2 and len(rollouts.sessions) == 1
        await said(client, main)
        assert len(rollouts.core.samples()) == 2
        assert (await rewarded(http, trajectory))["turns"] == 5
        await asyncio.sleep(3.0)
        assert not rollouts.core.samples() and not rollouts.core.counts()["batches"]

    play(story, policies={"trajectories": "by_kv"})


def test_without_by_kv_a_line_is_held_by_the_gaps_that_were_seen(play):
    async def story(cluster, http, other):
        trajectory = await opened(http, group="task", index=0)
        client, rollouts = client_of(http, trajectory), cluster.coordinator.rollouts
        messages = await said(client, [user("5 6")])
        await asyncio.sleep(60.0)
        assert rollouts.core.counts()["held"] == 1
        await asyncio.sleep(60.0)
        assert not rollouts.core.counts()["held"], "ten times the prior of ten seconds"
        for _ in range(3):
            messages = await said(client, [*messages, user("7")])
            await asyncio.sleep(30.0)
        await said(client, [*messages, user("8")])
        await asyncio.sleep(200.0)
        assert rollouts.core.counts()["held"] == 1, "its gaps are longer than the prior"
        await rewarded(http, trajectory)

    play(story)


@pytest.mark.parametrize("many", [100, pytest.param(1_000, marks=pytest.mark.long)])
def test_many_open_at_once_of_which_half_leave_or_vanish_leave_nothing(play, many):
    """A quarter each has its turns at once, pauses for minutes, leaves in the middle of an answer, or never returns."""

    async def story(cluster, http, other):
        rollouts = cluster.coordinator.rollouts
        kinds = ("quick", "slow", "leaves", "vanishes") * (many // 4)

        async def run(kind: str, trajectory: dict) -> dict | None:
            client = client_of(http, trajectory)
            first = asyncio.ensure_future(said(client, [user("5 6")]))
            if kind == "leaves":
                await asyncio.sleep(1.0)
                first.cancel()
                return None
            messages = [*await first, user("7")]
            if kind == "vanishes":
                return None
            if kind == "slow":
                await asyncio.sleep(200.0)
            await said(client, messages)
            return await rewarded(http, trajectory)

        seconds = 300.0 + 2 * many
        trajectories = [
            await opened(http, group=f"g{n}", index=0, seed=n, limits={"seconds": seconds}) for n in range(many)
        ]
        assert len(rollouts.trajectories) == many
        found = await asyncio.gather(*map(run, kinds, trajectories))
        ended = [body for body in found if body is not None]
        assert len(ended) == len(rollouts.trajectories) == many // 2 and all(body["turns"] == 2 for body in ended)
        assert not any(body["reencoded_tokens"] for body in ended)
        for n in (0, 1, many - 4, many - 3):
            alone = await run("quick", await opened(other, group=f"g{n}", index=0, seed=n))
            assert alone["rows"] == found[n]["rows"], "others change no token"
        await asyncio.sleep(seconds)
        assert not rollouts.trajectories and not rollouts.sessions and not rollouts.core.samples()

    play(story, policies={"trajectories": "by_kv"}, kv_capacity_blocks=400)
