"""Routes of SGLang's dialect, over the same service as vLLM's: generation, pauses, weights, caches, memory.

The service is one server of the dialect: a trainer that knows several addresses gets this one alone, also from
`/workers`, as of a router. Invariant: routes that are not served are refused with the reason; nothing is unpickled.
Source of names and formats: SGLang 0.5.23, `srt/entrypoints/http_server.py`.
"""

from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from tailrace.app.gateway.answering import made, streamed
from tailrace.app.gateway.context_bound import check_prompts
from tailrace.app.gateway.control_routes import version_of
from tailrace.app.gateway.edge.errors import add_refusals, bad_request, error_body
from tailrace.app.gateway.edge.fields import RequestBody
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.service import GatewayService, Wanted
from tailrace.app.gateway.sglang.answers import GenerateStream, generated
from tailrace.app.gateway.sglang.requests import GenerateRequest
from tailrace.app.http.weights_answer import told
from tailrace.deployments.coordinator.admission import PauseMode
from tailrace.deployments.messages.chunk import TAGS
from tailrace.deployments.messages.roles import Role

REFUSED = dict.fromkeys(
    ("/update_weights_from_tensor", "/update_weights_from_ipc", "/load_lora_adapter_from_tensors"),
    "its tensors come pickled, and nothing is unpickled here; write a folder, and give it to /update_weights_from_disk",
) | dict.fromkeys(
    ("/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed"),
    "the service is many engines behind one address; write a folder, and give it to /update_weights_from_disk",
)

ALL_MEMORY = {"weights", "kv_cache", "cuda_graph"}


class SglangPause(StrEnum):
    """Modes of `/pause_generation`. In both others than `abort` samples in flight wait, and continue afterwards."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class DiskUpdate(RequestBody):
    """`model_path`: a folder of safetensors that every replica can read. `weight_version`: a number above the present
    one; by default the next one. `abort_all_requests`: ends samples in flight first. `load_format`: safetensors in any
    case. The others have no effect.
    """

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors"] | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    flush_cache: bool = True


class MemoryTags(RequestBody):
    """`tags`: parts of an engine's memory; by default all."""

    tags: list[str] | None = None


def add_sglang(app: FastAPI, service: GatewayService) -> None:
    _add_generate(app, service)
    _add_pauses(app, service)
    _add_weights(app, service)
    _add_memory(app, service)
    _add_info(app, service)
    add_refusals(app, REFUSED, lambda line: {"success": False, "message": line} | bad_request(line))


def _add_generate(app: FastAPI, service: GatewayService) -> None:
    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate_sglang(request: GenerateRequest, http: Request):
        """Generate samples of one prompt, or of several, in SGLang's format."""
        model, bound = await service.model(request.lora_path), request.sampling_params.bound
        prompts = request.prompts()
        await check_prompts(prompts, model.prompts, model.max_model_len)
        sampled = request.sampling_params
        wanted = Wanted(prompts, sampled.n, bound, request.sampling(), request.chunk_tokens(), adapter=model.adapter)
        naming = Naming.of(http.headers, sampled.sampling_seed)
        if request.stream:
            return await streamed(service, http, GenerateStream(request, model, naming, wanted))
        return await made(service, http, wanted, naming, partial(generated, request, model, naming), form=_same)

    @app.post("/abort_request")
    async def abort_request(
        http: Request,
        abort_all: Annotated[bool, Body(embed=True)] = False,
        rid: Annotated[str | None, Body(embed=True)] = None,
    ):
        """End all samples in flight, with their tokens so far."""
        if not abort_all:
            raise ValueError("abort_all: one request ends when its client hangs up; give true, to end all")
        return {"aborted": await service.client(http.scope["role"]).cancel_all()}


def _same(content: Any) -> Any:
    return content


def _add_pauses(app: FastAPI, service: GatewayService) -> None:
    @app.post("/pause_generation")
    async def pause_generation(http: Request, mode: Annotated[SglangPause, Body(embed=True)] = SglangPause.ABORT):
        keeps = mode is not SglangPause.ABORT
        await service.client(http.scope["role"]).pause(PauseMode.KEEP if keeps else PauseMode.ABORT)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def continue_generation(http: Request, torch_empty_cache: Annotated[bool, Body(embed=True)] = True):
        await service.client(http.scope["role"]).resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(http: Request):
        """Drop the KV of ended chunks. An error 400 while chunks run."""
        if http.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return JSONResponse(error_body(403, "a page of another site sends this request"), 403)
        if await service.client(http.scope["role"]).reset_caches():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed: chunks are running.\n", 400)


def _add_weights(app: FastAPI, service: GatewayService) -> None:
    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(update: DiskUpdate, http: Request):
        role, version = http.scope["role"], version_of(update.weight_version)
        if update.abort_all_requests:
            await service.client(role).cancel_all()
        loaded = await service.update_weights(role, update.model_path, version)
        return {"success": True, "message": told(loaded)["message"], "num_paused_requests": 0}

    @app.get("/get_weight_version")
    async def get_weight_version():
        return {"weight_version": str((await service.client(Role.OBSERVER).status()).weights_version)}


def _add_memory(app: FastAPI, service: GatewayService) -> None:
    @app.post("/release_memory_occupation")
    async def release_memory_occupation(http: Request, memory: MemoryTags | None = None):
        """Give back the memory of weights and KV; samples in flight end with their tokens so far."""
        tags = set(memory.tags or TAGS) if memory else set(TAGS)
        if not set(TAGS) <= tags <= ALL_MEMORY:
            raise ValueError("tags: weights and KV are given back together; leave it out")
        await service.client(http.scope["role"]).sleep(PauseMode.ABORT)
        return {}

    @app.post("/resume_memory_occupation")
    async def resume_memory_occupation(http: Request, memory: MemoryTags | None = None):
        """Bring back `weights`, `kv_cache`, or both; with the last of them generation continues."""
        client = service.client(http.scope["role"])
        given = memory.tags if memory else None
        await client.wake_up(TAGS if given is None else tuple(tag for tag in given if tag != "cuda_graph"))
        if not (await client.status()).asleep:
            await client.resume()
        return {}


def _add_info(app: FastAPI, service: GatewayService) -> None:
    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info():
        model, status = await service.model(), await service.client(Role.OBSERVER).status()
        return {
            "model_path": model.root,
            "served_model_name": model.name,
            "tokenizer_path": model.root,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": str(status.weights_version),
        }

    @app.get("/v1/loads")
    async def loads():
        """Return the samples in flight: those that run, and those that wait."""
        status = await service.client(Role.OBSERVER).status()
        return {"loads": [{"dp_rank": 0, "num_running_reqs": status.running, "num_waiting_reqs": status.waiting}]}

    @app.get("/list_workers")
    async def list_workers(http: Request):
        """Return the addresses of the servers, as miles' router does: itself."""
        return {"urls": [str(http.base_url).rstrip("/")]}

    @app.get("/workers")
    async def workers(http: Request):
        """Return the servers behind this address, as a router of the dialect: itself."""
        url = str(http.base_url).rstrip("/")
        return {"workers": [{"id": url, "url": url, "worker_type": "regular", "is_healthy": True}], "total": 1}
