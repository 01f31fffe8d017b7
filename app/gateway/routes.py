"""The gateway's routes, as a FastAPI application over a `GatewayService`.

Errors have vLLM's format: 400 for a field that is not supported, 403 for a role without the right, 404 for another
model, 429 for a quota that is used up, 400 for one that is too small for the request, 503 while the service is
unreachable.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tailrace.app.board.routes import add_board
from tailrace.app.board.watcher import Watcher
from tailrace.app.gateway import answers
from tailrace.app.gateway.access_control import AccessControl
from tailrace.app.gateway.adapter_routes import add_adapters
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.context_bound import check_bound, check_known, check_length, check_prompts
from tailrace.app.gateway.control_routes import add_control
from tailrace.app.gateway.edge.errors import ErrorAnswer, SampleFailed, UnknownModel, add_errors, error_body, error_of
from tailrace.app.gateway.edge.json_body import StrictRoute
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.metrics import add_metrics
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.requests import CompletionRequest, TokensRequest
from tailrace.app.gateway.service import GatewayService, Wanted
from tailrace.app.gateway.stream_answers import AnswerStream, ChatStream, CompletionStream, TokensStream
from tailrace.app.gateway.tokenizing import add_tokenizing
from tailrace.app.http.event_stream import EventStream, left
from tailrace.deployments.messages.roles import Role

VERSION = version("tailrace")

ERRORS = {kind: {"model": ErrorAnswer, "description": "an error, in vLLM's form"} for kind in ("4XX", "5XX")}
STREAM = {200: {"description": "the answer, whole or as events", "content": {"text/event-stream": {}}}}
"""Responses of a route with `stream`."""


def make_app(service: GatewayService, config: GatewayConfig, lifespan: Callable | None = None) -> FastAPI:
    """Returns the application. `lifespan`: see FastAPI."""
    about = "vLLM's routes, over open sessions of Tailrace"
    app = FastAPI(title="Tailrace", version=VERSION, description=about, lifespan=lifespan, responses=ERRORS)
    app.router.route_class = StrictRoute
    app.add_middleware(AccessControl, config=config)
    add_errors(app)
    _add_generation(app, service, config)
    _add_model(app, service)
    add_tokenizing(app, service)
    add_control(app, service)
    add_adapters(app, service)
    _add_board(app, service, config)
    add_metrics(app)
    return app


def _add_generation(app: FastAPI, service: GatewayService, config: GatewayConfig) -> None:
    @app.post("/v1/completions", responses=STREAM)
    async def completions(request: CompletionRequest, http: Request):
        model = await service.model(request.model)
        bound, context = request.max_tokens, model.max_model_len
        check_bound("max_tokens", bound, context)
        prompts = request.prompts(model.prompts)
        await check_prompts(prompts, model.prompts, context)
        wanted = Wanted(prompts, request.n, bound, request.sampling(), request.chunk_tokens(), adapter=model.adapter)
        naming = Naming.of(http.headers, request.seed)
        if request.stream:
            return await _streamed(service, http, CompletionStream(request, model, naming, wanted))
        return await _made(service, http, wanted, naming, partial(answers.completion, request, model, naming))

    @app.post("/v1/chat/completions", responses=STREAM)
    async def chat_completions(request: ChatRequest, http: Request):
        model, (name, bound) = await service.model(request.model), request.bound
        check_bound(name, bound, model.max_model_len)
        chat = await service.chat(request)
        check_length(len(chat.token_ids), model.max_model_len)
        prompts = [{"token_ids": chat.token_ids}]
        wanted = Wanted(prompts, request.n, bound, chat.sampling(), request.chunk_tokens(), adapter=model.adapter)
        naming = Naming.of(http.headers, request.seed)
        if request.stream:
            return await _streamed(service, http, ChatStream(chat, request, model, naming, wanted))
        return await _made(service, http, wanted, naming, partial(answers.chat_completion, chat, model, naming))

    @app.post("/inference/v1/generate", responses=STREAM)
    async def generate(request: TokensRequest, http: Request):
        model, sampled = await service.model(request.model), request.sampling_params
        sampled.sampling_mask = sampled.sampling_mask or config.return_sampling_mask
        prompt, bound = request.prompt(), sampled.max_tokens
        check_length(len(request.token_ids), model.max_model_len)
        check_known("token_ids", request.token_ids, model.prompts)
        wanted = Wanted([prompt], sampled.n, bound, sampled.sampling(), request.chunk_tokens(), adapter=model.adapter)
        naming = Naming.of(http.headers, sampled.seed)
        naming = naming._replace(group=await asyncio.to_thread(naming.group_of, prompt))  # once: features are large
        if request.stream:
            return await _streamed(service, http, TokensStream(request, model, naming, wanted))
        return await _made(service, http, wanted, naming, partial(answers.tokens, request, model, naming))


async def _made(service: GatewayService, http: Request, wanted: Wanted, naming: Naming, body: Callable):
    """Generates, and answers by `body`, unless the client has left."""
    found = await _unless_gone(http, service.generate(http.scope["role"], wanted, naming))
    if found is None:
        return JSONResponse(error_body(499, "the client has left"), 499)
    if failed := answers.failures(found):
        raise SampleFailed(failed[0])
    return JSONResponse(body(found))  # FastAPI would walk over every token of a dict


async def _streamed(service: GatewayService, http: Request, stream: AnswerStream):
    """Answers by events. A refusal comes before the first one, with its own status."""
    parts = service.stream(http.scope["role"], stream.wanted, stream.naming)
    first = await _unless_gone(http, anext(parts))
    if first is None:
        await parts.aclose()
        return JSONResponse(error_body(499, "the client has left"), 499)

    async def events():
        async with aclosing(parts):
            for event in stream.events(*first):
                yield event
            async for number, part in parts:
                for event in stream.events(number, part):
                    yield event
            for event in stream.last():
                yield event

    return EventStream(events(), lambda error: error_of(error)[0])


async def _unless_gone(http: Request, work: Awaitable):
    """Returns the work's result; None if the client leaves first, which cancels the work."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(left(http.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        watch.cancel()
        task.cancel()


def _add_model(app: FastAPI, service: GatewayService) -> None:
    @app.get("/v1/models")
    async def models():
        return answers.models(await service.model(), await service.client(Role.OBSERVER).adapters())

    @app.get("/v1/models/{name:path}")
    async def model(name: str):
        for card in (await models())["data"]:
            if card["id"] == name:
                return card
        raise UnknownModel(f"The model `{name}` does not exist; GET /v1/models lists those that do")

    @app.get("/version")
    async def show_version():
        return {"version": app.version}

    @app.get("/liveness")
    async def liveness():
        return {}

    @app.get("/health")
    async def health():
        status = await service.client(Role.OBSERVER).status()
        if status.paused or any(one.ready for one in status.replicas):
            return {}
        return JSONResponse(error_body(503, "no replica is ready"), 503)


def _add_board(app: FastAPI, service: GatewayService, config: GatewayConfig) -> None:
    """Adds the page of a running service, for any role; texts of samples for those that may roll out."""
    watcher = Watcher(lambda: service.client(Role.OBSERVER))
    add_board(app, watcher, lambda http: service.client(http.scope["role"]), any_host=config.tokens_file is not None)
