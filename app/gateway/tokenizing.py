"""`/tokenize` and `/detokenize`, in vLLM's forms: texts and chats to token ids, as generation makes them."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from tailrace.app.gateway.chat.requests import ChatRequest, RequestedMessage, Tool
from tailrace.app.gateway.service import GatewayService


class Tokenized(BaseModel):
    """A text."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizedChat(BaseModel):
    """A chat, with arguments of the chat template as in `/v1/chat/completions`."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    messages: list[RequestedMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def chat(self) -> ChatRequest:
        return ChatRequest(**self.model_dump(exclude={"return_token_strs"}), tool_choice="none")


class Detokenized(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    tokens: list[int]


def add_tokenizing(app: FastAPI, service: GatewayService) -> None:
    @app.post("/tokenize")
    async def tokenize(request: TokenizedChat | Tokenized):
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
