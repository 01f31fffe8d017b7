"""The answers to a harness below a trajectory's address: each is a turn, whichever dialect asks for it."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from tailrace.app.gateway import answers
from tailrace.app.gateway.answering import made, streamed
from tailrace.app.gateway.chat.chat import Chat
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.context_bound import check_length
from tailrace.app.gateway.service import GatewayService, ServedModel, Wanted
from tailrace.app.gateway.stream_answers import ChatStream
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
        """Returns the model that makes a turn, and its chat. Harnesses name models of their own, which mean nothing."""
        if request.n != 1:
            raise ValueError(f"n: {request.n} answers; a turn of a trajectory has one, so ask again for another")
        model = await self.service.model(turn.model)
        return model, await self.service.chat(request.model_copy(update={"model": turn.model}), turn)

    async def answer(
        self,
        http: Request,
        turn: TurnInProgress,
        request: ChatRequest,
        whole: Callable[[dict], Any] = dict,
        form: Callable[[AsyncIterator[dict]], Response] | None = None,
    ) -> Response:
        """Makes a turn. `whole`, `form`: convert a whole chat completion, and the events of a streamed one. A limit of
        the answer beyond the context is cut: harnesses know other models' contexts.
        """
        model, chat = await self.chat(turn, request)
        check_length(len(chat.token_ids), model.max_model_len)
        naming, left = turn.begin(chat)
        bound = min(request.bound[1] or model.max_model_len, model.max_model_len, left)
        prompts = [{"token_ids": chat.token_ids}]
        wanted = Wanted(prompts, 1, bound, chat.sampling(), request.chunk_tokens(), adapter=model.adapter)
        if request.stream:
            stream = ChatStream(chat, request, model, naming, wanted)
            return await streamed(self.service, http, stream, turn.end, form)
        body = partial(answers.chat_completion, chat, model, naming)
        return await made(self.service, http, wanted, naming, body, turn.end, whole)
