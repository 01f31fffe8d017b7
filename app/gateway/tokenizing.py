"""`/tokenize` and `/detokenize`, in vLLM's formats: texts and chats to token ids, as generation makes them."""

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Discriminator, Field, Tag

from tailrace.app.gateway.chat.requests import ChatRequest, Templated
from tailrace.app.gateway.edge.fields import Ids
from tailrace.app.gateway.edge.honoured import HonouredFields
from tailrace.app.gateway.service import GatewayService


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
        if isinstance(request, Tokenized):
            tokens = model.prompts.encode(request.prompt, request.add_special_tokens)
        else:
            tokens = list((await service.chat(request.chat())).token_ids)
        names = [model.prompts.name(token) for token in tokens] if request.return_token_strs else None
        return {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": names}

    @app.post("/detokenize")
    async def detokenize(request: Detokenized):
        model = await service.model(request.model)
        if (wrong := model.prompts.foreign(request.tokens)) is not None:
            raise ValueError(f"tokens: {wrong} is not in the vocabulary")
        return {"prompt": model.prompts.decode(request.tokens)}
