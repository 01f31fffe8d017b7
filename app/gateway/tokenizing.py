"""`/tokenize` and `/detokenize`, in vLLM's formats: texts and chats to token ids, as generation makes them.

Invariant: texts are read on threads. One of 2 MB took the event loop 20 s, one of 10 MB more than a session's lease.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Field, Tag

from tailrace.app.gateway.chat.requests import ChatRequest, Templated
from tailrace.app.gateway.edge.fields import Ids
from tailrace.app.gateway.edge.honoured import HonouredFields
from tailrace.app.gateway.service import GatewayService, ServedModel


class TokenizerBody(HonouredFields):
    """A body for the tokenizer alone."""

    model: str | None = None


class Tokenized(TokenizerBody):
    """A text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizedChat(TokenizerBody, Templated):
    """A chat, with arguments of the chat template as in `/v1/chat/completions`."""

    return_token_strs: bool | None = None

    def chat(self) -> ChatRequest:
        given = {name: getattr(self, name) for name in ("model", *Templated.model_fields)}
        return ChatRequest(**given, tool_choice="none")


class Detokenized(TokenizerBody):
    tokens: Ids


def _kind(body: Any) -> str:
    return "Chat" if isinstance(body, dict) and body.get("messages") is not None else "Text"


Given = Annotated[
    Annotated[TokenizedChat, Tag("Chat")] | Annotated[Tokenized, Tag("Text")], Field(discriminator=Discriminator(_kind))
]


def add_tokenizing(app: FastAPI, service: GatewayService) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Given):
        model = await service.model(request.model)
        tokens = None if isinstance(request, Tokenized) else (await service.chat(request.chat())).token_ids
        return await asyncio.to_thread(_tokenized, request, model, tokens)

    @app.post("/detokenize")
    async def detokenize(request: Detokenized):
        model = await service.model(request.model)
        if (wrong := model.prompts.foreign(request.tokens)) is not None:
            raise ValueError(f"tokens: {wrong} is not in the vocabulary")
        return {"prompt": await asyncio.to_thread(model.prompts.decode, request.tokens)}


def _tokenized(request: Tokenized | TokenizedChat, model: ServedModel, tokens: Sequence[int] | None) -> JSONResponse:
    """Returns the answer of `/tokenize`. `tokens`: a chat's, or None for those of the text."""
    prompts = model.prompts
    found = prompts.encode(request.prompt, request.add_special_tokens) if tokens is None else list(tokens)
    names = [prompts.name(token) for token in found] if request.return_token_strs else None
    about = {"count": len(found), "max_model_len": model.max_model_len}
    return JSONResponse(about | {"tokens": found, "token_strs": names})  # FastAPI would walk over every token
