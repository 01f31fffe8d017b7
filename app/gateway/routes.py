"""The gateway's routes, as a FastAPI application over a `GatewayService`.

Errors have vLLM's form: 400 for a field that is not honoured, 403 for a role without the right, 404 for another model,
429 for a quota, 503 while the service is away.
"""

import asyncio
from collections.abc import Awaitable
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError, StarletteHTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, ValidationError

from tailrace.app.calls.client import QuotaExceeded, RolloutRejected, WeightsRejected
from tailrace.app.calls.resume import lost_service
from tailrace.app.gateway import answers
from tailrace.app.gateway.config import GatewayConfig
from tailrace.app.gateway.doors import Doors, error_body
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.requests import ChatRequest, CompletionRequest, TokensRequest
from tailrace.app.gateway.service import GatewayService, UnknownModel, first_cause
from tailrace.deployments.messages.roles import Role

VERSION = version("tailrace")


class Tokenized(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class Detokenized(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    tokens: list[int]


class WeightsFolder(BaseModel):
    """prime-rl's form: a folder of safetensors. `version`: by default the next one."""

    model_config = ConfigDict(extra="forbid")
    weight_dir: str
    version: int | None = None


def make_app(service: GatewayService, config: GatewayConfig) -> FastAPI:
    app = FastAPI(title="Tailrace", version=VERSION, description="vLLM's routes, over open sessions of Tailrace")
    app.add_middleware(Doors, config=config)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _other)
    for kind in (ValueError, PermissionError, ExceptionGroup, *lost_service()):
        app.add_exception_handler(kind, _failed)
    _add_generation(app, service)
    _add_model(app, service)
    _add_weights(app, service)
    return app


def _add_generation(app: FastAPI, service: GatewayService) -> None:
    @app.post("/v1/completions")
    async def completions(request: CompletionRequest, http: Request):
        return await _made(service, http, request, request.prompts(), request.max_tokens, answers.completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: ChatRequest, http: Request):
        bound = request.max_completion_tokens or request.max_tokens
        return await _made(service, http, request, request.prompts(), bound, answers.chat_completion)

    @app.post("/inference/v1/generate")
    async def generate(request: TokensRequest, http: Request):
        bound = request.sampling_params.max_tokens or 16  # vLLM's default
        prompts = [{"token_ids": tuple(request.token_ids)}]
        return await _made(service, http, request, prompts, bound, answers.tokens)


async def _made(service: GatewayService, http: Request, request, prompts: list[dict], bound: int | None, body):
    """Generate, and answer by `body`, unless the client has left."""
    model = await service.model(request.model)
    sampled = request.sampling_params if isinstance(request, TokensRequest) else request
    naming = Naming.of(http.headers, sampled.seed)
    found = await _unless_gone(http, service.generate(http.scope["role"], sampled, prompts, bound, naming))
    if found is None:
        return JSONResponse(error_body(499, "the client has left"), 499)
    if failed := answers.failures(found):
        return JSONResponse(error_body(500, failed[0]), 500)
    return JSONResponse(body(request, model, naming, found))  # FastAPI would walk over every token of a dict


async def _unless_gone(http: Request, work: Awaitable):
    """The work's result; None if the client leaves first, which cancels it."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        watch.cancel()
        task.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _add_model(app: FastAPI, service: GatewayService) -> None:
    @app.get("/v1/models")
    async def models():
        return answers.models(await service.model())

    @app.post("/tokenize")
    async def tokenize(request: Tokenized):
        model = await service.model(request.model)
        tokens = model.prompts.encode(request.prompt, request.add_special_tokens)
        return {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": None}

    @app.post("/detokenize")
    async def detokenize(request: Detokenized):
        model = await service.model(request.model)
        if (wrong := model.prompts.foreign(request.tokens)) is not None:
            raise ValueError(f"tokens: {wrong} is not in the vocabulary")
        return {"prompt": model.prompts.decode(request.tokens)}

    @app.get("/liveness")
    async def liveness():
        return {}

    @app.get("/health")
    async def health():
        status = await service.client(Role.OBSERVER).status()
        return JSONResponse({}, 200 if any(one.ready for one in status.replicas) else 503)

    @app.get("/server_info")
    async def server_info():
        status, model = await service.client(Role.OBSERVER).status(), await service.model()
        return {
            "tailrace": VERSION,
            "model": model.root,
            "max_model_len": model.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "weights_version": status.weights_version,
            "replicas": len(status.replicas),
        }

    @app.get("/get_world_size")
    async def get_world_size():
        return {"world_size": len((await service.client(Role.OBSERVER).status()).replicas)}


def _add_weights(app: FastAPI, service: GatewayService) -> None:
    @app.post("/update_weights")
    async def update_weights(request: WeightsFolder, http: Request):
        loaded = await service.update_weights(http.scope["role"], request.weight_dir, request.version)
        return {"message": f"weights {loaded} are loaded", "weight_version": str(loaded)}

    @app.get("/weight_info")
    async def weight_info():
        status = await service.client(Role.OBSERVER).status()
        return {"weight_version": str(status.weights_version), "weights_digest": status.weights_digest}


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    message = first["msg"].removeprefix("Value error, ")
    return JSONResponse(error_body(400, f"{place}: {message}" if place else message), 400)


async def _other(_: Request, error: StarletteHTTPException) -> JSONResponse:
    return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    cause = first_cause(error)
    status = status_of(cause)
    text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    if isinstance(cause, ValidationError):
        text = cause.errors()[0]["msg"].removeprefix("Value error, ")
    return JSONResponse(error_body(status, text), status, {"retry-after": "1"} if status in (429, 503) else None)


def status_of(error: BaseException) -> int:
    """The HTTP status of an error of the client."""
    kinds = (
        (UnknownModel, 404),
        (QuotaExceeded, 429),
        (PermissionError, 403),
        ((RolloutRejected, WeightsRejected, ValueError), 400),
        (lost_service(), 503),
    )
    return next((status for kind, status in kinds if isinstance(error, kind)), 500)
