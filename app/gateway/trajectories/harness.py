"""The answers to a harness below a trajectory's address: each is a turn, whichever dialect asks for it.

A limit of an answer beyond the context is cut: harnesses know other models' contexts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from tailrace.app.gateway import answers
from tailrace.app.gateway.answering import made, streamed
from tailrace.app.gateway.chat.chat import Chat
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.context_bound import check_known, check_length
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.requests import CompletionRequest
from tailrace.app.gateway.service import GatewayService, ServedModel, Wanted
from tailrace.app.gateway.stream_answers import ChatStream, CompletionStream
from tailrace.app.gateway.trajectories.trajectories import GatewayTrajectories
from tailrace.app.gateway.trajectories.turn import TurnInProgress


class Harness:
    """`trajectories`: those of this gateway."""

    def __init__(self, service: GatewayService, trajectories: GatewayTrajectories):
        self.service, self._trajectories = service, trajectories

    async def turn(self, http: Request) -> TurnInProgress:
        """Returns the next turn of the trajectory that a request's path names. Raises UnknownTrajectory."""
        return await self._trajectories.turn(http.scope["role"], http.path_params["name"])

    async def chat(self, turn: TurnInProgress, request: ChatRequest) -> tuple[ServedModel, Chat]:
        """Returns the model that makes a turn, and its chat."""
        model = await self._model(turn, request.n)
        return model, await self.service.chat(request.model_copy(update={"model": turn.model}), turn)

    async def answer(
        self,
        http: Request,
        turn: TurnInProgress,
        request: ChatRequest,
        whole: Callable[[dict], Any] = dict,
        form: Callable[[AsyncIterator[dict]], Response] | None = None,
    ) -> Response:
        """Makes a turn of a chat. `whole`, `form`: convert a whole completion, and the events of a streamed one."""
        model, chat = await self.chat(turn, request)
        naming, wanted = _begun(turn, model, request, chat.token_ids, chat)
        if request.stream:
            stream = ChatStream(chat, request, model, naming, wanted)
            return await streamed(self.service, http, stream, turn.end, form)
        body = partial(answers.chat_completion, chat, model, naming)
        return await made(self.service, http, wanted, naming, body, turn.end, whole)

    async def complete(self, http: Request, turn: TurnInProgress, request: CompletionRequest) -> Response:
        """Makes a turn of a prompt without messages. Raises ValueError, one line, for a text after the first turn."""
        model = await self._model(turn, request.n)
        prompts = await asyncio.to_thread(request.prompts, model.prompts)
        if len(prompts) != 1:
            raise ValueError(f"prompt: {len(prompts)} prompts; a turn of a trajectory has one, so ask for each")
        token_ids = prompts[0].get("token_ids")
        if token_ids is None:
            if turn.tree.turns:
                raise ValueError("prompt: a text would encode earlier answers again; give token ids after a first turn")
            token_ids = await asyncio.to_thread(model.prompts.encode, prompts[0]["text"], True)
        check_known("prompt", token_ids, model.prompts)
        naming, wanted = _begun(turn, model, request, token_ids)
        if request.stream:
            return await streamed(self.service, http, CompletionStream(request, model, naming, wanted), turn.end)
        body = partial(answers.completion, request, model, naming)
        return await made(self.service, http, wanted, naming, body, turn.end)

    async def _model(self, turn: TurnInProgress, n: int) -> ServedModel:
        """Returns the trajectory's model. Harnesses name models of their own, which mean nothing."""
        if n != 1:
            raise ValueError(f"n: {n} answers; a turn of a trajectory has one, so ask again for another")
        return await self.service.model(turn.model)


def _begun(
    turn: TurnInProgress,
    model: ServedModel,
    request: ChatRequest | CompletionRequest,
    token_ids: tuple[int, ...],
    chat: Chat | None = None,
) -> tuple[Naming, Wanted]:
    check_length(len(token_ids), model.max_model_len)
    naming, left = turn.begin(token_ids, chat)
    wished = request.max_tokens if chat is None else request.bound[1]
    bound = min(wished or model.max_model_len, model.max_model_len, left)
    sampling = turn.tree.opening.sampling.over((chat or request).sampling())
    prompt, images = ({"token_ids": token_ids}, ()) if chat is None else (chat.prompt, chat.image_names)
    settings = sampling, request.chunk_tokens(), model.adapter, images
    return naming, Wanted([prompt], 1, bound, *settings)
