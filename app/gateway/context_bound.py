"""The model's context as a limit of requests, in the words by which clients recognise an overlong prompt.

Invariant: routes refuse and cut as vLLM 0.32 does. A prompt that leaves no room is refused. An answer's limit beyond
the room is cut; one beyond the whole context is refused on the routes of completions and chats, and cut on the others.
"""

import asyncio
from collections.abc import Mapping, Sequence

from tailrace.app.gateway.edge.errors import FieldRefused
from tailrace.deployments.batches.prompts import Prompts

ADDED_TOKENS = 16
"""Upper bound of the tokens that tokenizers add to a text by themselves."""


def check_bound(name: str, tokens: int | None, context: int) -> None:
    """Raises FieldRefused if an answer's limit is beyond the context. `name`: name of its field."""
    if tokens is not None and tokens > context:
        raise FieldRefused(
            f"{name}={tokens} cannot be greater than max_model_len={context}. Please request fewer output tokens.", name
        )


async def check_prompts(prompts: Sequence[Mapping], tokenizer: Prompts, context: int) -> None:
    """Raises FieldRefused for a prompt that leaves no room for a token. `prompts`: in the format of a PromptGroup."""
    for prompt in prompts:
        token_ids, text = prompt.get("token_ids"), prompt.get("text", "")
        if token_ids is None and len(text.encode()) + ADDED_TOKENS < context:
            continue  # a token has a byte or more
        if token_ids is None:
            token_ids = await asyncio.to_thread(tokenizer.encode, text, True)
        check_length(len(token_ids), context)
        check_known("prompt", token_ids, tokenizer)


def check_known(name: str, token_ids: Sequence[int], tokenizer: Prompts) -> None:
    """Raises FieldRefused for a token id that the model does not have. `name`: name of the field."""
    if (wrong := tokenizer.foreign(token_ids)) is not None:
        raise FieldRefused(f"{name}: Token id {wrong} is out of vocabulary", name)


def check_length(tokens: int, context: int) -> None:
    """Raises FieldRefused if a prompt of this length leaves no room for a token."""
    if tokens < context:
        return
    beyond = f"contains {tokens} input tokens, which exceeds this limit even without any output tokens"
    full = f"contains {tokens} input tokens, which leaves no room for an output token"
    raise FieldRefused(
        f"This model's maximum context length is {context} tokens. However, your prompt "
        f"{beyond if tokens > context else full}. Please reduce the length of the input prompt.",
        "input_tokens",
    )
