"""Everything that goes out under a name is of that name: choices, logprobs, masks and texts of several prompts.

The simulated engines' tokens are a digest of their sample's key, and logprobs are one of their token, so a swap shows.
"""

import json

import httpx
import pytest
from virtual_cluster import play as play_on

from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService, ServedModel
from tailrace.deployments.messages.chunk import sample_key
from tailrace.lab.fuzz.chunks import logprob_of
from tailrace.lab.fuzz.cluster import SimulatedPrompts
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.token_law import VOCABULARY, token_at

MEAN_TOKENS = 60
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
SEED = 40


class NumberPrompts(SimulatedPrompts):
    """Texts are numbers in a row; a chat is its messages' contents."""

    def chat(self, messages, add_generation_prompt=True, **template) -> str:
        return " ".join(one["content"] for one in messages)

    def piece(self, token_id: int) -> str:
        return str(token_id)


@pytest.fixture
def play(tmp_path):
    def run(story):
        async def with_gateway(cluster, client):
            service = GatewayService(lambda role: driver_client(cluster), GatewayConfig())
            service._model = ServedModel("simulated", "simulated", 512, NumberPrompts())
            transport = httpx.ASGITransport(make_app(service, GatewayConfig()))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
                await story(http)

        policies = {"chunking": {"type": "fixed", "chunk_tokens": 20}}
        play_on(with_gateway, tmp_path, mean_tokens=MEAN_TOKENS, policies=policies)

    return run


async def whole(http, path: str, **body) -> dict:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(http, path: str, **body) -> list[list[dict]]:
    """The choices' pieces, by their index."""
    answer = await http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    events = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line.startswith("data: {")
    ]
    pieces = [choice for event in events for choice in event["choices"]]
    return [
        [one for one in pieces if one["index"] == index] for index in range(1 + max(one["index"] for one in pieces))
    ]


def assert_own(tokens: list[int], logprobs: list[float], last: dict, prompt: list[int], number: int) -> None:
    """The tokens are those of the named sample, the `number`-th of its prompt, and each logprob is its token's. `last`:
    the choice, or the last piece of it."""
    assert last["weight_versions"] == [{"version": "0", "start": 0, "end": len(tokens)}]
    key = last["tailrace"]
    assert (key["seed"], key["step"], key["index"], key["turn"]) == (0, 0, SEED + number, 0)
    own = sample_key(0, 0, key["group"], key["index"])
    assert tokens == [token_at(own, "start", len(prompt) + at, MEAN_TOKENS) for at in range(len(tokens))] != []
    assert logprobs == list(map(logprob_of, tokens))


def groups_differ(choices: list[dict], n: int) -> None:
    groups = [choice["tailrace"]["group"] for choice in choices]
    assert [len(set(groups[start : start + n])) for start in range(0, len(groups), n)] == [1] * (len(groups) // n)
    assert len(set(groups)) == len(groups) // n


def test_choices_of_several_prompts_are_in_their_order(play):
    async def story(http):
        asked = {"prompt": PROMPTS, "n": 3, "seed": SEED, "max_tokens": 50, "logprobs": 1, "return_token_ids": True}
        answer = await whole(http, "/v1/completions", **asked)
        alone = [await whole(http, "/v1/completions", **asked | {"prompt": prompt}) for prompt in PROMPTS]
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == list(range(9))
        groups_differ(choices, 3)
        for place, choice in enumerate(choices):
            prompt, number = PROMPTS[place // 3], place % 3
            found = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            assert_own(*found, choice, prompt, number)
            assert choice["prompt_token_ids"] == prompt
            assert choice["tailrace"] == alone[place // 3]["choices"][number]["tailrace"]
            assert choice["text"] == alone[place // 3]["choices"][number]["text"]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))

    play(story)


def test_streamed_choices_of_several_prompts_are_in_their_order(play):
    async def story(http):
        asked = {"prompt": PROMPTS, "n": 3, "seed": SEED, "max_tokens": 50, "logprobs": 1, "return_token_ids": True}
        answer = await whole(http, "/v1/completions", **asked)
        for place, (first, *pieces) in enumerate(await streamed(http, "/v1/completions", **asked)):
            assert first["prompt_token_ids"] == PROMPTS[place // 3]
            tokens = [token for piece in pieces for token in piece["token_ids"]]
            logprobs = [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"]["token_logprobs"]]
            assert_own(tokens, logprobs, pieces[-1], PROMPTS[place // 3], place % 3)
            assert "".join(piece["text"] for piece in pieces) == answer["choices"][place]["text"]

    play(story)


def test_choices_of_a_chat_are_in_their_order(play):
    async def story(http):
        asked = {"messages": [{"role": "user", "content": "5 6"}], "n": 4, "seed": SEED, "max_tokens": 50}
        asked |= {"logprobs": True, "return_token_ids": True}
        answer = await whole(http, "/v1/chat/completions", **asked)
        prompt = answer["prompt_token_ids"]
        streams = await streamed(http, "/v1/chat/completions", **asked)
        for number, (choice, pieces) in enumerate(zip(answer["choices"], streams, strict=True)):
            logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
            assert_own(choice["token_ids"], logprobs, choice, prompt, number)
            content = [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"] and pieces[-1]["tailrace"] == choice["tailrace"]
            text = "".join(piece["delta"].get("content") or "" for piece in pieces)
            assert text == choice["message"]["content"]

    play(story)


def test_choices_of_token_ids_are_in_their_order(play):
    async def story(http):
        sampling = {"max_tokens": 50, "n": 4, "seed": SEED, "logprobs": 1, "top_k": 5, "sampling_mask": True}
        asked = {"token_ids": PROMPTS[0], "sampling_params": sampling, "return_token_ids": True}
        answer = await whole(http, "/inference/v1/generate", **asked)
        streams = await streamed(http, "/inference/v1/generate", **asked)
        for number, (choice, (_, *pieces)) in enumerate(zip(answer["choices"], streams, strict=True)):
            logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
            assert_own(choice["token_ids"], logprobs, choice, PROMPTS[0], number)
            assert choice["sampling_mask"] == [[token, VOCABULARY] for token in choice["token_ids"]]
            assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
            assert pieces[-1]["tailrace"] == choice["tailrace"]

    play(story)
