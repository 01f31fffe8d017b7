"""Images of chats over the simulated cluster: in every dialect, below a trajectory and in ordinary chats."""

import asyncio
import json

import anthropic
import httpx
import httpx2
import openai
import pytest
from chatting_prompts import ChattingPrompts
from fake_images import MARK, FakeImages, flat, picture, url
from image_model import IMAGE_TOKENS
from virtual_cluster import play as play_on

from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService, ServedModel
from tailrace.deployments.batches.trajectories import Trajectories as Book
from tailrace.deployments.features.kept_items import KeptItems
from tailrace.lab.fuzz.drivers import driver_client

URL = "http://gateway/v1/trajectories"
PLACEHOLDER = [MARK] * IMAGE_TOKENS


class SeeingPrompts(ChattingPrompts):
    """A chat's template takes contents in parts."""

    def chat(self, messages, add_generation_prompt=True, **template) -> str:
        as_user = [one | {"role": "user"} if one["role"] == "tool" else one for one in messages]
        return super().chat(flat(as_user), add_generation_prompt, **template)


class Gateway:
    """A gateway in this process. `http`: a client of it; `images`: its processor."""

    def __init__(self, cluster):
        service = GatewayService(lambda role: driver_client(cluster), GatewayConfig())
        self.images = FakeImages()
        service._model = ServedModel("simulated", "simulated", 512, SeeingPrompts(), images=self.images)
        app = make_app(service, GatewayConfig())
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://gateway"
        )
        self.second = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))

    async def close(self) -> None:
        await self.http.aclose()
        await self.second.aclose()
        self.images.thread.shutdown()

    async def ask(self, method: str, path: str, trajectory: dict | None = None, **body) -> dict:
        """The answer of a route, or of one below a trajectory."""
        base = "" if trajectory is None else f"{URL}/{trajectory['id']}"
        headers = {} if trajectory is None else {"Authorization": f"Bearer {trajectory['api_key']}"}
        answer = await self.http.request(method, f"{base}{path}", json=body or None, headers=headers)
        return answer.json() | {"status": answer.status_code}

    async def opened(self, **body) -> dict:
        return await self.ask("POST", "/v1/trajectories", **(body or {"index": 0}))


@pytest.fixture
def play(tmp_path):
    """Runs a story with two gateways over a cluster."""

    def run(story):
        async def with_gateways(cluster, client):
            one, other = Gateway(cluster), Gateway(cluster)
            await story(cluster, one, other)
            await one.close()
            await other.close()

        play_on(with_gateways, tmp_path, mean_tokens=20)

    return run


def user(*parts: int | str) -> dict:
    """A message of images, by their numbers, and of texts."""
    return {"role": "user", "content": [picture(one) if isinstance(one, int) else text(one) for one in parts]}


def text(said: str) -> dict:
    return {"type": "text", "text": said}


async def by_chats(gateway: Gateway, base: dict, turns: list[list], stream: bool = False) -> None:
    client, messages = openai.AsyncOpenAI(http_client=gateway.http, max_retries=0, **base), []
    for parts in turns:
        messages.append(user(*parts))
        if stream:
            events = await client.chat.completions.create(model="any", messages=messages, stream=True)
            said = [one.delta.content or "" async for event in events for one in event.choices]
            messages.append({"role": "assistant", "content": "".join(said)})
        else:
            answer = await client.chat.completions.create(model="any", messages=messages)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))


async def by_streamed_chats(gateway: Gateway, base: dict, turns: list[list]) -> None:
    await by_chats(gateway, base, turns, stream=True)


async def by_messages(gateway: Gateway, base: dict, turns: list[list]) -> None:
    client, messages = anthropic.AsyncAnthropic(http_client=gateway.second, max_retries=0, **base), []
    for parts in turns:
        content = [source(one) if isinstance(one, int) else text(one) for one in parts]
        messages.append({"role": "user", "content": content})
        counted = await client.messages.count_tokens(model="any", messages=messages)
        answer = await client.messages.create(model="any", messages=messages, max_tokens=400)
        assert answer.usage.input_tokens == counted.input_tokens
        messages.append({"role": "assistant", "content": answer.content})


def source(number: int) -> dict:
    data = url(number).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


async def by_responses(gateway: Gateway, base: dict, turns: list[list]) -> None:
    client, previous = openai.AsyncOpenAI(http_client=gateway.http, max_retries=0, **base), None
    for parts in turns:
        content = [
            {"type": "input_image", "image_url": url(one)} if isinstance(one, int)
            else {"type": "input_text", "text": one} for one in parts
        ]  # fmt: skip
        items = [{"role": "user", "content": content}]
        previous = (await client.responses.create(model="any", input=items, previous_response_id=previous)).id


TURNS = [[1, "5 6"], ["7"], [2, "8"]]


def base_of(trajectory: dict) -> dict:
    return {"base_url": trajectory["base_url"], "api_key": trajectory["api_key"]}


def test_images_are_part_of_the_turns_of_every_dialect(play):
    async def story(cluster, one, other):
        expected = None
        for dialect in (by_chats, by_streamed_chats, by_messages, by_responses):
            trajectory = await one.opened(group="see", index=1, seed=6)
            await dialect(one, base_of(trajectory), TURNS)
            body = await one.ask("POST", "/reward", trajectory, reward=1.0)
            (row,) = body["rows"]
            assert body["turns"] == 3 and body["branches"] == body["reencoded_tokens"] == 0, dialect
            places = row["features"]["mm_placeholders"]["image"]
            assert len(places) == len(row["features"]["kwargs_data"]["image"]) == 2
            for place in places:
                span = slice(place["offset"], place["offset"] + place["length"])
                assert row["token_ids"][span] == PLACEHOLDER and not any(row["mask"][span])
            expected = expected or row
            assert row == expected, dialect

    play(story)


def test_another_image_is_a_branch_whatever_its_tokens_and_has_its_own_row(play):
    async def story(cluster, one, other):
        trajectory = await one.opened(seed=6)
        base = base_of(trajectory)
        await by_chats(one, base, [[1, "5"], ["7"]])
        await by_chats(one, base, [[2, "5"], ["7"]])
        await by_chats(one, base, [[1, "5"]])  # the same prompt again is another sample
        body = await one.ask("GET", "", trajectory)
        assert body["turns"] == 5 and body["branches"] == 2 and len(body["rows"]) == 3
        first, second, again = (row["features"]["mm_hashes"]["image"] for row in body["rows"])
        assert first != second and first == again
        assert sum(sum(row["mask"]) for row in body["rows"]) == body["sampled_tokens"]
        await one.ask("DELETE", "", trajectory)

    play(story)


def test_a_row_sent_back_is_the_prompt_that_was_answered(play):
    async def story(cluster, one, other):
        trajectory = await one.opened(group="see", index=1, seed=6)
        await by_chats(one, base_of(trajectory), [[1, "5 6"]])
        (row,) = (await one.ask("DELETE", "", trajectory))["rows"]
        (turn,) = row["turns"]
        names = {"X-Tailrace-Seed": "6", "X-Tailrace-Group": "see", "X-Tailrace-Index": "1"}
        asked = {"token_ids": row["token_ids"][: turn["start"]], "features": row["features"]}
        answer = await one.http.post("/inference/v1/generate", json=asked, headers=names)
        assert answer.json()["choices"][0]["token_ids"] == row["token_ids"][turn["start"] :]

    play(story)


def test_images_of_a_tool_s_result_reach_the_prompt(play):
    async def story(cluster, one, other):
        trajectory = await one.opened()
        use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [text("8"), source(3)]}
        messages = [
            {"role": "user", "content": "5"}, {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]  # fmt: skip
        answer = await one.ask("POST", "/messages", trajectory, model="any", messages=messages, max_tokens=9)
        assert answer["status"] == 200, answer
        output = [{"type": "input_text", "text": "8"}, {"type": "input_image", "image_url": url(3), "detail": "auto"}]
        items = [
            {"type": "message", "role": "user", "content": "5"},
            {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t", "output": output},
        ]
        answer = await one.ask("POST", "/responses", trajectory, model="any", input=items)
        assert answer["status"] == 200, answer
        body = await one.ask("DELETE", "", trajectory)
        names = [row["features"]["mm_hashes"]["image"] for row in body["rows"]]
        assert len(names) == 2 and names[0] == names[1] and len(names[0]) == 1

    play(story)


def test_another_gateway_and_another_coordinator_go_on_with_the_images(play):
    async def story(cluster, one, other):
        trajectory = await one.opened(seed=2)
        messages = [user(1, "5")]
        for number, (gateway, parts) in enumerate(((one, [2, "6"]), (other, ["7"]), (one, [1, "8"]), (one, ["9"]))):
            answer = await gateway.ask("POST", "/chat/completions", trajectory, model="any", messages=messages)
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, user(*parts)]
            if number == 2:  # `one` knows all turns
                book = Book("another", lambda: 0.0, cluster.coordinator.rollouts.sessions)
                cluster.coordinator.rollouts.trajectories = book
        body = await other.ask("DELETE", "", trajectory)
        (row,) = body["rows"]
        assert body["turns"] == 4 and len(row["features"]["mm_hashes"]["image"]) == 3
        assert body["reencoded_tokens"] == 0

    play(story)


def test_a_later_turn_sends_the_data_of_its_new_images_alone(play, monkeypatch):
    whole, none = [[[yes] * count for count in (1, 2, 3)] for yes in (True, False)]
    expected = {
        "stays": [whole[0], [False, True], none[1], none[2]],
        "is lost": [none[0], none[1], none[1], none[2], whole[2]],  # the service has the former trajectory's until then
    }
    sent = []
    keep = KeptItems.features
    monkeypatch.setattr(
        KeptItems, "features", lambda self, given: (sent.append(given.kwargs_data["image"]), keep(self, given))[1]
    )

    async def story(cluster, one, other):
        rows = {}
        for coordinator in ("stays", "is lost"):
            sent.clear()
            trajectory = await one.opened(group="see", index=1, seed=6)
            messages = []
            for parts in ([1, "5"], [2, "6"], ["7"], [1, "8"]):
                messages.append(user(*parts))
                asked = {"model": "any", "messages": messages, "stream": parts == [2, "6"]}
                answer = await one.http.post(
                    f"{trajectory['base_url']}/chat/completions", json=asked,
                    headers={"Authorization": f"Bearer {trajectory['api_key']}"},
                )  # fmt: skip
                assert answer.status_code == 200, answer.text
                messages.append({"role": "assistant", "content": said(answer)})
                if coordinator == "is lost" and parts == ["7"]:
                    cluster.coordinator.rollouts.prompts._items._items.clear()
            rows[coordinator] = (await one.ask("DELETE", "", trajectory))["rows"]
            with_data = [[bool(data) for data in items] for items in sent]
            assert with_data == expected[coordinator]
        assert rows["stays"] == rows["is lost"]

    play(story)


def test_mates_send_their_images_once(play, monkeypatch):
    sent = []
    keep = KeptItems.features
    monkeypatch.setattr(
        KeptItems, "features", lambda self, given: (sent.append(given.kwargs_data["image"]), keep(self, given))[1]
    )

    async def story(cluster, one, other):
        asked = {"model": "simulated", "messages": [user(1, 2, "5")], "seed": 3, "n": 4}
        answer = await one.ask("POST", "/v1/chat/completions", **asked)
        assert len(answer["choices"]) == 4
        assert [[bool(data) for data in items] for items in sent] == [[True, True]] + [[False, False]] * 3
        sent.clear()
        mates = [await other.opened(group="see", index=index) for index in range(3)]
        await asyncio.gather(*(by_chats(other, base_of(mate), [[1, "5"], [2, "6"]]) for mate in mates))
        data = [bool(data) for items in sent for data in items]
        assert len(sent) == 6 and sum(data) == 2, "each image once"
        for mate in mates:
            await other.ask("DELETE", "", mate)

    play(story)


def said(answer: httpx.Response) -> str:
    """The text of an answer, whole or streamed."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(one["delta"].get("content") or "" for event in events for one in json.loads(event)["choices"])


def test_rows_say_so_if_an_image_cannot_be_made_again_and_nothing_ends(play):
    async def story(cluster, one, other):
        trajectory = await one.opened()
        await by_chats(one, base_of(trajectory), [[1, "5"]])
        process = one.images.process
        one.images.process = lambda *asked: process(*asked)._replace(names=("another",))
        answer = await one.ask("POST", "/reward", trajectory, reward=1.0)
        assert answer["status"] == 500 and "its processor has changed since its turn" in answer["error"]["message"]
        assert (await other.ask("POST", "/reward", trajectory, reward=1.0))["reward"] == 1.0

    play(story)


REFUSED = [
    ([{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}], "not fetched from an address"),
    ([picture(1)] * 10, "10 images; a prompt has at most 9"),
    ([{"type": "input_audio", "input_audio": {}}], "content of type 'input_audio': a chat is text and images here"),
]


@pytest.mark.parametrize(("content", "reason"), REFUSED)
def test_what_is_refused_begins_no_turn(play, monkeypatch, content, reason):
    monkeypatch.setattr("tailrace.app.gateway.images.image_processor.MAX_ITEMS", 9)

    async def story(cluster, one, other):
        trajectory = await one.opened()
        for place, path in ((trajectory, "/chat/completions"), (None, "/v1/chat/completions")):
            asked = {"model": "simulated", "messages": [{"role": "user", "content": content}]}
            answer = await one.ask("POST", path, place, **asked)
            assert answer["status"] == 400 and reason in answer["error"]["message"]
            assert "\n" not in answer["error"]["message"]
        assert (await one.ask("DELETE", "", trajectory))["turns"] == 0

    play(story)


def test_ordinary_chats_have_the_tokens_of_generate_and_a_group_of_their_own(play):
    async def story(cluster, one, other):
        def asked(number: int) -> dict:
            same = {"model": "simulated", "return_token_ids": True, "seed": 3, "max_tokens": 30}
            return same | {"messages": [user(number, "5")]}

        first, second = [await one.ask("POST", "/v1/chat/completions", **asked(number)) for number in (1, 2)]
        assert first["prompt_token_ids"] == second["prompt_token_ids"]
        groups = [answer["choices"][0]["tailrace"]["group"] for answer in (first, second)]
        assert groups[0] != groups[1] and first["choices"][0]["token_ids"] != second["choices"][0]["token_ids"]
        again = await asyncio.gather(*(other.ask("POST", "/v1/chat/completions", **asked(1)) for _ in range(2)))
        assert [one["choices"][0]["token_ids"] for one in again] == [first["choices"][0]["token_ids"]] * 2
        count = await one.ask("POST", "/tokenize", model="simulated", messages=[user(1, "5")])
        assert count["tokens"] == first["prompt_token_ids"]

    play(story)
