"""The gateway's routes, as a FastAPI application over a `GatewayService`.

Errors have vLLM's format: 400 for a field that is not supported, 403 for a role without the right, 404 for another
model, 429 for a quota that is used up, 400 for one that is too small for the request, 503 while the service is
unreachable.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tailrace.app.board.routes import add_board
from tailrace.app.board.watcher import Watcher
from tailrace.app.gateway import answers
from tailrace.app.gateway.access_control import AccessControl, needs_token, read_tokens
from tailrace.app.gateway.adapter_routes import add_adapters
from tailrace.app.gateway.answering import made, streamed
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.context_bound import check_bound, check_known, check_length, check_prompts
from tailrace.app.gateway.control_routes import add_control
from tailrace.app.gateway.edge.errors import ErrorAnswer, UnknownModel, add_errors, error_body
from tailrace.app.gateway.edge.json_body import StrictRoute
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.metrics import add_metrics
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.publish_routes import add_publishing
from tailrace.app.gateway.requests import CompletionRequest, TokensRequest
from tailrace.app.gateway.service import GatewayService, Wanted
from tailrace.app.gateway.sglang.routes import add_sglang
from tailrace.app.gateway.stream_answers import ChatStream, CompletionStream, TokensStream
from tailrace.app.gateway.tokenizing import add_tokenizing
from tailrace.app.gateway.trajectories.routes import add_trajectories
from tailrace.app.gateway.trajectories.trajectories import GatewayTrajectories
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
    trajectories = GatewayTrajectories(lambda role: service.client(role).trajectories)
    app.add_middleware(AccessControl, config=config, is_key=trajectories.is_key)
    add_errors(app)
    _add_generation(app, service, config)
    _add_model(app, service)
    add_tokenizing(app, service)
    add_control(app, service)
    add_adapters(app, service)
    add_publishing(app, service, config.max_body_bytes)
    add_sglang(app, service)
    add_trajectories(app, service, trajectories)
    _add_board(app, service, config)
    add_metrics(app)
    return app


def _add_generation(app: FastAPI, service: GatewayService, config: GatewayConfig) -> None:
    @app.post("/v1/completions", responses=STREAM)
    async def completions(request: CompletionRequest, http: Request):
        model = await service.model(request.model)
        bound, context = request.max_tokens, model.max_model_len
        check_bound("max_tokens", bound, context)
        prompts = await asyncio.to_thread(request.prompts, model.prompts)
        await check_prompts(prompts, model.prompts, context)
        wanted = Wanted(prompts, request.n, bound, request.sampling(), request.chunk_tokens(), adapter=model.adapter)
        naming = Naming.of(http.headers, request.seed)
        if request.stream:
            return await streamed(service, http, CompletionStream(request, model, naming, wanted))
        return await made(service, http, wanted, naming, partial(answers.completion, request, model, naming))

    @app.post("/v1/chat/completions", responses=STREAM)
    async def chat_completions(request: ChatRequest, http: Request):
        model, (name, bound) = await service.model(request.model), request.bound
        check_bound(name, bound, model.max_model_len)
        chat = await service.chat(request)
        check_length(len(chat.token_ids), model.max_model_len)
        settings = chat.sampling(), request.chunk_tokens(), model.adapter, chat.image_names
        wanted = Wanted([chat.prompt], request.n, bound, *settings)
        naming = await asyncio.to_thread(Naming.of(http.headers, request.seed).named, chat.prompt)
        if request.stream:
            return await streamed(service, http, ChatStream(chat, request, model, naming, wanted))
        return await made(service, http, wanted, naming, partial(answers.chat_completion, chat, model, naming))

    @app.post("/inference/v1/generate", responses=STREAM)
    async def generate(request: TokensRequest, http: Request):
        model, sampled = await service.model(request.model), request.sampling_params
        sampled.sampling_mask = sampled.sampling_mask or config.return_sampling_mask
        prompt, bound = request.prompt(), sampled.max_tokens
        check_length(len(request.token_ids), model.max_model_len)
        check_known("token_ids", request.token_ids, model.prompts)
        wanted = Wanted([prompt], sampled.n, bound, sampled.sampling(), request.chunk_tokens(), adapter=model.adapter)
        naming = await asyncio.to_thread(Naming.of(http.headers, sampled.seed).named, prompt)
        if request.stream:
            return await streamed(service, http, TokensStream(request, model, naming, wanted))
        return await made(service, http, wanted, naming, partial(answers.tokens, request, model, naming))


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
    @app.get("/health_generate")
    async def health():
        status = await service.client(Role.OBSERVER).status()
        if status.paused or any(one.ready for one in status.replicas):
            return {}
        return JSONResponse(error_body(503, "no replica is ready"), 503)


def _add_board(app: FastAPI, service: GatewayService, config: GatewayConfig) -> None:
    """Adds the page of a running service, for any role; texts of samples for those that may roll out."""
    watcher = Watcher(lambda: service.client(Role.OBSERVER))
    tokens = None if config.tokens_file is None else read_tokens(Path(config.tokens_file))
    add_board(app, watcher, lambda http: service.client(http.scope["role"]), any_host=needs_token(tokens))
