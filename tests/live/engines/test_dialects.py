"""Trajectories of answers that call tools, in each dialect, by the packages of OpenAI and Anthropic.

The tokens that were sampled stay, though no tokenizer would encode their text so. No engine runs here.
"""

import asyncio
from types import SimpleNamespace

import anthropic
import httpx
import httpx2
import openai
import pytest

from tailrace.app.gateway.chat.answer_parser import AnswerParser
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService, ServedModel
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.batches.trajectories import Trajectories
from tailrace.deployments.messages.rollout import SampleResult, Segment
from tailrace.deployments.messages.session import SampleAnswer, SampleTokens
from tailrace.http import Client
from tailrace.policies.protocol.actions import SampleEnd

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "look", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": %d}}\n</tool_call>'
ANSWERS = (f"I look.\n{CALL % 1}\n{CALL % 20}", "There is nothing.")
USER = {"role": "user", "content": "What is there?"}
DIALECTS = ("chats", "messages", "responses", "stored")


class ScriptedAnswers(GatewayService):
    """A service whose answers are ANSWERS in turn, each character encoded by itself."""

    def __init__(self, prompts: Prompts, thoughts: str = ""):
        """`thoughts`: begin of each answer."""
        super().__init__(lambda role: SimpleNamespace(trajectories=self), GatewayConfig(tool_parser="hermes"))
        parser = AnswerParser("hermes", "qwen3" if thoughts else None, prompts.tokenizer)
        self._model = ServedModel("model", "model", 2_048, prompts, parser)
        self._prompts, self._thoughts = prompts, thoughts
        self.tools, self.sampled = [], []
        sessions = SimpleNamespace(
            call=lambda *called: self.tools.append(called[2]), end_trajectory=lambda *sample: None
        )
        self.book = Trajectories("epoch", lambda: 0.0, sessions)

    async def generate(self, role, wanted, naming):
        text = ANSWERS[len(self.sampled) % len(ANSWERS)]
        token_ids = [token for one in text for token in self._prompts.encode(one)]
        token_ids[:0], text = self._prompts.encode(self._thoughts), self._thoughts + text
        token_ids.append(self._prompts.tokenizer.eos_token_id)
        self.sampled.append((wanted.prompts[0]["token_ids"], token_ids))
        logprobs = [-0.5] * len(token_ids)
        segment = Segment(weights_version=4, replica_id="r", start=0, end=len(token_ids))
        sample = SampleResult(sample_index=0, token_ids=token_ids, text=text, logprobs=logprobs, raw_logprobs=logprobs,
                              finish_reason=SampleEnd.STOP, segments=(segment,))  # fmt: skip
        prompt = wanted.prompts[0]["token_ids"]
        answer = SampleAnswer(batch_id="b", group="g", prompt_token_ids=prompt, prompt_key="", step=0, sample=sample)
        return [[answer]]

    async def stream(self, role, wanted, naming):
        ((answer,),) = await self.generate(role, wanted, naming)
        ids, logprobs = answer.sample.token_ids, answer.sample.logprobs
        yield 0, SampleTokens(prompt_token_ids=tuple(answer.prompt_token_ids), start=0)
        for start in range(0, len(ids), 7):
            piece = {"token_ids": tuple(ids[start : start + 7]), "logprobs": tuple(logprobs[start : start + 7])}
            last = answer if start + 7 >= len(ids) else None
            yield 0, SampleTokens(start=start, answer=last, **piece)

    async def open(self, opening, left_s, turns=()):
        self.book.open(opening, left_s, turns)

    async def read(self, name, epoch="", known=0):
        return self.book.read(name, epoch, known)

    async def add(self, name, epoch, turn):
        return self.book.add(name, epoch, turn)

    async def end(self, name, reward):
        return self.book.end(name)


async def by_chats(base: dict, app, streams: bool) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    client = openai.AsyncOpenAI(http_client=http, max_retries=0, **base)
    asked = {"model": "any", "tools": [{"type": "function", "function": FUNCTION}]}

    async def answered(messages: list):
        if not streams:
            return (await client.chat.completions.create(messages=messages, **asked)).choices[0].message
        async with client.chat.completions.stream(messages=messages, **asked) as stream:
            return (await stream.get_final_completion()).choices[0].message

    first = await answered([USER])
    results = [{"role": "tool", "tool_call_id": call.id, "content": "no"} for call in first.tool_calls]
    assert len(results) == 2
    second = await answered([USER, first.model_dump(exclude_none=True), *results])
    assert second.content.strip() == ANSWERS[1]


async def by_messages(base: dict, app, streams: bool) -> None:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    client = anthropic.AsyncAnthropic(http_client=http, max_retries=0, **base)
    tools = [{"name": "look", "input_schema": PARAMETERS}]

    async def answered(messages: list):
        asked = {"model": "any", "max_tokens": 900, "messages": messages, "tools": tools}
        if not streams:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    first = await answered([USER])
    uses = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and [use.input for use in uses] == [{"a": 1}, {"a": 20}]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "no"} for use in uses]
    said = [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await answered([USER, *said])
    assert second.content[-1].text.strip() == ANSWERS[1] and second.stop_reason == "end_turn"


async def by_responses(base: dict, app, streams: bool, stored: bool = False) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    client = openai.AsyncOpenAI(http_client=http, max_retries=0, **base)
    tools = [{"type": "function", "strict": False, **FUNCTION}]

    async def answered(items: list, **more):
        asked = {"model": "any", "input": items, "tools": tools, "store": stored, **more}
        if not streams:
            return await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            return await stream.get_final_response()

    first = await answered([USER])
    calls = [item for item in first.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ['{"a": 1}', '{"a": 20}'] and first.status == "completed"
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "no"} for call in calls]
    if stored:
        second = await answered(results, previous_response_id=first.id)
    else:
        second = await answered([USER, *(one.model_dump(exclude_none=True) for one in first.output), *results])
    assert second.output_text.strip() == ANSWERS[1]


async def played(dialect: str, base: dict, app, streams: bool) -> None:
    if dialect == "chats":
        await by_chats(base, app, streams)
    elif dialect == "messages":
        await by_messages(base, app, streams)
    else:
        await by_responses(base, app, streams, stored=dialect == "stored")


@pytest.fixture(scope="module")
def prompts(model_dir) -> Prompts:
    return Prompts(str(model_dir), 2_048)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_sampled_tokens_stay_when_a_harness_returns_with_its_tools_results(prompts, dialect, streams):
    async def story():
        service = ScriptedAnswers(prompts)
        app = make_app(service, GatewayConfig())
        client = Client("http://gateway", transport=httpx.ASGITransport(app))
        trajectory = await client.trajectory(group="g")
        await played(dialect, {"base_url": trajectory.base_url, "api_key": trajectory.api_key}, app, streams)
        found = await trajectory.reward(1.0)
        client.close()
        assert service.tools == ["look"], "the first answer's first call"
        (row,) = found.rows
        (first_prompt, first), (second_prompt, second) = service.sampled
        assert second_prompt[: len(first_prompt) + len(first)] == (*first_prompt, *first)
        assert list(row.token_ids) == [*second_prompt, *second] and found.reencoded_tokens == 0
        again = prompts.encode(prompts.decode(list(row.token_ids), special=True))
        assert again != list(row.token_ids), "no tokenizer would encode it so"
        assert sum(row.mask) == len(first) + len(second) == found.sampled_tokens
        assert {span.version for turn in row.turns for span in turn.weight_versions} == {4}

    asyncio.run(story())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_thoughts_come_and_return_in_the_dialects_own_form(thinking_tokenizer, dialect, streams):
    prompts = Prompts(str(thinking_tokenizer), 2_048)

    async def story():
        service = ScriptedAnswers(prompts, "<think>\nA lamp?\n</think>\n\n")
        app = make_app(service, GatewayConfig())
        client = Client("http://gateway", transport=httpx.ASGITransport(app))
        trajectory = await client.trajectory(group="g")
        base = {"base_url": trajectory.base_url, "api_key": trajectory.api_key}
        await played(dialect, base, app, streams)
        found = await trajectory.reward(1.0)
        client.close()
        (row,) = found.rows
        (first_prompt, first), (second_prompt, second) = service.sampled
        assert second_prompt[: len(first_prompt) + len(first)] == (*first_prompt, *first)
        assert list(row.token_ids) == [*second_prompt, *second] and found.reencoded_tokens == 0

    asyncio.run(story())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_usage_counts_the_tokens_of_thoughts(thinking_tokenizer, streams):
    prompts = Prompts(str(thinking_tokenizer), 2_048)
    count = len(prompts.encode("\nA lamp?\n"))

    async def story():
        app = make_app(ScriptedAnswers(prompts, "<think>\nA lamp?\n</think>\n\n"), GatewayConfig())
        client = Client("http://gateway", transport=httpx.ASGITransport(app))
        trajectory = await client.trajectory(group="g")
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        base = {"base_url": trajectory.base_url, "api_key": trajectory.api_key}
        harness = openai.AsyncOpenAI(http_client=http, max_retries=0, **base)
        same, options = {"model": "any", "stream": streams}, {"stream_options": {"include_usage": True}}
        chat = await harness.chat.completions.create(messages=[USER], **same, **options if streams else {})
        response = await harness.responses.create(input=[USER], **same)
        if streams:
            *_, chat = [event async for event in chat]
            *_, response = [event.response async for event in response if event.type == "response.completed"]
        assert chat.usage.completion_tokens_details.reasoning_tokens == count
        assert response.usage.output_tokens_details.reasoning_tokens == count
        client.close()

    asyncio.run(story())


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXEL}
URL = f"data:image/png;base64,{PIXEL}"
PARTS = {
    "/chat/completions": ("messages", {"type": "image_url", "image_url": {"url": URL}}),
    "/messages": ("messages", {"type": "image", "source": SOURCE}),
    "/responses": ("input", {"type": "input_image", "image_url": URL, "detail": "auto"}),
}


@pytest.mark.parametrize("path", PARTS)
def test_an_image_is_refused_in_one_line_and_begins_no_turn(prompts, path):
    async def story():
        app = make_app(service := ScriptedAnswers(prompts), GatewayConfig())
        client = Client("http://gateway", transport=httpx.ASGITransport(app))
        trajectory = await client.trajectory(group="g")
        key = {"authorization": f"Bearer {trajectory.api_key}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), headers=key) as http:
            field, part = PARTS[path]
            asked = {"model": "any", "stream": True, field: [{"role": "user", "content": [part]}]}
            asked |= {"max_tokens": 9} if path == "/messages" else {}
            answer = await http.post(trajectory.base_url + path, json=asked)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and "image" in message and "takes text alone; remove it" in message
        assert not service.sampled and PIXEL not in message
        client.close()

    asyncio.run(story())
