"""Prompts against a real tokenizer: what is taken, and what is refused by name."""

import pytest

from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.messages.rollout import ChatMessage, PromptGroup, Rejected


@pytest.fixture(scope="module")
def prompts(model_dir):
    return Prompts(str(model_dir), max_model_len=64)


def group(**what) -> PromptGroup:
    return PromptGroup(prompt_id="p", samples=1, **what)


def test_text_tokens_and_chat_are_taken(prompts):
    text = prompts.prepare_group(group(text="Hello there"))
    assert prompts.decode(text.token_ids) == "Hello there"
    assert prompts.prepare_group(group(token_ids=text.token_ids)).token_ids == text.token_ids
    chat = prompts.prepare_group(group(messages=[ChatMessage(role="user", content="Hello there")]))
    assert set(text.token_ids) < set(chat.token_ids)


def test_max_tokens_is_cut_to_what_the_context_leaves(prompts):
    assert prompts.prepare_group(group(token_ids=(5,) * 60, max_tokens=100)).max_tokens == 4
    assert prompts.prepare_group(group(token_ids=(5,) * 60, max_tokens=3)).max_tokens == 3


@pytest.mark.parametrize(
    "what, said",
    [
        ({"token_ids": (5,) * 64}, "prompt 'p' has 64 tokens; the model's context is 64"),
        ({"token_ids": (5, 49_152)}, "token_ids: 49152 is not in the vocabulary"),
        ({"token_ids": (-1,)}, "token_ids: -1 is not in the vocabulary"),
        ({"text": "x", "forced_token_ids": ((5, 60_000),)}, "forced_token_ids: 60000 is not in the vocabulary"),
    ],
)
def test_what_the_model_cannot_take_is_refused_by_name(prompts, what, said):
    refused = prompts.prepare_group(group(**what))
    assert isinstance(refused, Rejected) and said in refused.reason
