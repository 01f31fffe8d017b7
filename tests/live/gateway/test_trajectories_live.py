"""Trajectories over HTTP: packages of OpenAI and Anthropic, the Python client, and the example."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import anthropic
import openai
import pytest
from gateway_service import TOKENS

from tailrace.http import Client

EXAMPLE = Path(__file__).parents[3] / "examples" / "agent.py"
USER = {"role": "user", "content": "Is the door open?"}
MORE = {"role": "user", "content": "Are you sure?"}
PARAMETERS = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "door", "parameters": PARAMETERS, "strict": True}}]


@pytest.fixture
def tailrace(address):
    client = Client(address[0], TOKENS["evaluator"])
    yield client
    client.close()


def checked(found) -> list[int]:
    """The tokens of one row of two turns."""
    (row,) = found.rows
    assert found.turns == 2 and found.branches == found.reencoded_tokens == 0
    assert len(row.token_ids) == len(row.mask) == len(row.logprobs) and sum(row.mask) == found.sampled_tokens
    assert row.turns[1].parent == 0 and row.turns[1].start > row.turns[0].end
    return list(row.token_ids)


def test_every_dialect_has_the_same_tokens_under_the_same_names(tailrace):
    rows = []
    for dialect in (by_chats, by_messages, by_responses):
        for streams in (False, True):
            trajectory = tailrace.trajectory_blocking(group="door", index=1, seed=6)
            dialect({"base_url": trajectory.base_url, "api_key": trajectory.api_key}, streams)
            rows.append(checked(trajectory.reward_blocking(0.5)))
    assert all(row == rows[0] for row in rows)


def by_chats(base: dict, streams: bool) -> None:
    client, messages = openai.OpenAI(**base), [USER]
    for _ in range(2):
        asked = {"model": "any", "messages": messages, "max_tokens": 20}
        if streams:
            chunks = client.chat.completions.create(stream=True, **asked)
            text = "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices)
        else:
            text = client.chat.completions.create(**asked).choices[0].message.content
        messages = [*messages, {"role": "assistant", "content": text}, MORE]


def by_messages(base: dict, streams: bool) -> None:
    client, messages = anthropic.Anthropic(**base), [USER]
    for _ in range(2):
        asked = {"model": "any", "messages": messages, "max_tokens": 20}
        counted = client.messages.count_tokens(model="any", messages=messages).input_tokens
        if streams:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        assert answer.usage.input_tokens == counted and answer.usage.output_tokens <= 20
        messages = [*messages, {"role": "assistant", "content": answer.content}, MORE]


def by_responses(base: dict, streams: bool) -> None:
    client, items, previous = openai.OpenAI(**base), [USER], None
    for _ in range(2):
        asked = {"model": "any", "input": items, "max_output_tokens": 20}
        asked |= {} if previous is None else {"previous_response_id": previous}
        if streams:
            *_, last = client.responses.create(stream=True, **asked)
            assert last.type == "response.completed"
            answer = last.response
        else:
            answer = client.responses.create(**asked)
        assert answer.usage.output_tokens <= 20
        previous, items = answer.id, [MORE]


def test_a_tool_s_result_goes_on_from_the_sampled_call(tailrace, tiny_model):
    vocabulary = json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"]
    no_white_space = {str(token): -100 for text, token in vocabulary.items() if not set(text) - set("ĠĊĉč")}
    trajectory = tailrace.trajectory_blocking(group="tools")
    client = openai.OpenAI(base_url=trajectory.base_url, api_key=trajectory.api_key)
    asked = {"model": "any", "tools": TOOLS, "max_tokens": 100, "logit_bias": no_white_space}
    first = client.chat.completions.create(messages=[USER], tool_choice="required", parallel_tool_calls=False, **asked)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is."}
    client.chat.completions.create(messages=[USER, first.choices[0].message, result], tool_choice="none", **asked)
    checked(trajectory.rows_blocking())
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=trajectory.base_url, api_key="tj-wrong").models.list()
    trajectory.close_blocking()


def test_leaving_a_trajectory_ends_it(tailrace):
    async def story():
        async with await tailrace.trajectory(limits={"turns": 1}) as trajectory:
            assert (await trajectory.rows()).rows == ()
        with pytest.raises(PermissionError, match="give the key of a trajectory that has not ended"):
            await trajectory.rows()

    asyncio.run(story())
    with pytest.raises(ValueError, match="days"):
        tailrace.trajectory_blocking(limits={"days": 1})


def test_the_example_prints_its_rows(address):
    command = [sys.executable, str(EXAMPLE), address[0], TOKENS["evaluator"]]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "in 3 turns under weights {" in found.stdout and "0 branches, 0 sampled tokens encoded again" in found.stdout
