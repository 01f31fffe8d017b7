"""Trajectories behind Serve's proxy: unmodified packages of OpenAI and Anthropic, with tools, and the example."""

import asyncio
import subprocess
import sys
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from gateway_service import TOKENS

from tailrace.http import Client

EXAMPLE = Path(__file__).parents[3] / "examples" / "agent.py"
OPEN = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "Is the door open?"}
FUNCTION = {"name": "door", "parameters": OPEN, "strict": True}


@pytest.fixture
def tailrace(address):
    client = Client(address[0], TOKENS["evaluator"])
    yield client
    client.close()


def checked(found) -> None:
    """One row of two turns, whose sampled tokens are its own."""
    (row,) = found.rows
    assert found.turns == 2 and found.branches == found.reencoded_tokens == 0
    assert len(row.token_ids) == len(row.mask) == len(row.logprobs) and sum(row.mask) == found.sampled_tokens
    assert row.turns[1].parent == 0 and row.turns[1].start > row.turns[0].end


def test_chats_with_tools(tailrace):
    trajectory = tailrace.trajectory_blocking(group="chats")
    client = openai.OpenAI(base_url=trajectory.base_url, api_key=trajectory.api_key)
    asked = {"model": "any", "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 60}
    first = client.chat.completions.create(messages=[USER], tool_choice="required", **asked)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is."}
    client.chat.completions.create(messages=[USER, first.choices[0].message, result], **asked)
    checked(trajectory.rows_blocking())
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=trajectory.base_url, api_key=TOKENS["observer"] + "x").models.list()
    checked(trajectory.reward_blocking(0.5))
    assert httpx.get(trajectory.base_url, headers={"x-api-key": trajectory.api_key}).status_code in (401, 404)


@pytest.mark.parametrize("streams", [False, True])
def test_messages_with_tools(tailrace, streams):
    trajectory = tailrace.trajectory_blocking(group="messages")
    client = anthropic.Anthropic(base_url=trajectory.base_url, api_key=trajectory.api_key)
    tools = [{"name": "door", "input_schema": OPEN, "strict": True}]

    def answered(messages: list, **more):
        asked = {"model": "any", "max_tokens": 60, "messages": messages, "tools": tools, **more}
        if not streams:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    counted = client.messages.count_tokens(model="any", messages=[USER], tools=tools)
    first = answered([USER], tool_choice={"type": "any"})
    assert first.stop_reason == "tool_use" and first.usage.input_tokens == counted.input_tokens
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert use.name == "door" and isinstance(use.input["open"], bool)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "It is."}]}
    answered([USER, {"role": "assistant", "content": first.content}, result])
    checked(trajectory.reward_blocking(0.5))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_responses_with_tools(tailrace, streams, stored):
    trajectory = tailrace.trajectory_blocking(group="responses")
    client = openai.OpenAI(base_url=trajectory.base_url, api_key=trajectory.api_key)
    tools = [{"type": "function", **FUNCTION}]

    def answered(items: list, **more):
        asked = {"model": "any", "max_output_tokens": 60, "input": items, "tools": tools, **more}
        if not streams:
            return client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            return stream.get_final_response()

    first = answered([USER], tool_choice="required")
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is."}
    if stored:
        answered([result], previous_response_id=first.id)
    else:
        answered([USER, *(item.model_dump(exclude_none=True) for item in first.output), result])
    checked(trajectory.reward_blocking(0.5))


def test_leaving_a_trajectory_ends_it(tailrace):
    async def story():
        async with await tailrace.trajectory(limits={"turns": 1}) as trajectory:
            assert (await trajectory.rows()).rows == ()
        with pytest.raises(ValueError, match=r"trajectory .*: there is none, or it has ended"):
            await trajectory.rows()
        with pytest.raises(PermissionError, match="give the key of a trajectory that has not ended"):
            await trajectory.rows()

    asyncio.run(story())
    with pytest.raises(ValueError, match="days"):
        tailrace.trajectory_blocking(limits={"days": 1})


def test_the_example_prints_its_rows(address):
    found = subprocess.run(
        [sys.executable, str(EXAMPLE), address[0], TOKENS["evaluator"]],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert "in 3 turns under weights {" in found.stdout and "0 branches, 0 sampled tokens encoded again" in found.stdout
