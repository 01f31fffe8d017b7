"""Routes by which trainers control a service: pauses, updates of weights, caches. vLLM 0.32's dialect, and prime-rl's.

Invariant: an update is committed whole, by `/finish_weight_update` or by a folder in `/update_weights`; one that fails
or breaks off before that leaves the service as it was. Routes that are not served are refused with the reason. Source
of names and formats: vLLM's `entrypoints/rl/online/api_router.py`, `entrypoints/serve/dev`.
"""

from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Query, Request
from pydantic import model_validator

from tailrace.app.gateway.edge.errors import add_refusals
from tailrace.app.gateway.edge.fields import RequestBody
from tailrace.app.gateway.service import GatewayService, check_here
from tailrace.app.gateway.vllm_config import vllm_config
from tailrace.app.http.weights_answer import told
from tailrace.deployments.coordinator.admission import PauseMode
from tailrace.deployments.coordinator.weight_transfer import backend_of, named_in_memory
from tailrace.deployments.messages.chunk import TAGS
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.transfer import MEMORY

REFUSED = {
    "/collective_rpc": "no method of a worker is called by name; docs/http.md has the routes for weights",
    "/start_draft_weight_update": "weights of draft models do not come by HTTP; restart the drafter on another folder",
    "/fetch_weights": "deltas of checkpoints are not read; give all weights in a folder, to /update_weights",
}


class WeightsUpdate(RequestBody):
    """prime-rl's format: `weight_dir`, a folder of safetensors or `memory:...`, and `version`, by default the next one.

    vLLM's format: `update_info`, of the trainer's transfer engine, between `/start_weight_update` and
    `/finish_weight_update`.
    """

    weight_dir: str | None = None
    version: int | None = None
    update_info: dict[str, Any] | list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _one_form(self):
        if self.update_info is None and self.weight_dir is None:
            raise ValueError("give weight_dir, a folder, or update_info; prime-rl: weight_broadcast.type filesystem")
        if self.update_info is not None and (self.weight_dir, self.version) != (None, None):
            raise ValueError("give weight_dir and version, or update_info; not both")
        return self


class UpdateStart(RequestBody):
    is_checkpoint_format: bool = True

    @model_validator(mode="after")
    def _checkpoint(self):
        if not self.is_checkpoint_format:
            raise ValueError("is_checkpoint_format: tensors come under the names of a saved folder; give true")
        return self


class UpdateFinish(RequestBody):
    """`weight_version`: a number above the present one; by default the next one."""

    weight_version: str | None = None


def version_of(given: str | None) -> int | None:
    """Returns the number of a `weight_version`. Raises ValueError, one line, if it is none."""
    if given is not None and not (given.isdecimal() and len(given) < 20):
        raise ValueError(f"weight_version: {given[:30]!r} is not a number; versions are, and only grow")
    return None if given is None else int(given)


def add_control(app: FastAPI, service: GatewayService) -> None:
    _add_pauses(app, service)
    _add_sleep(app, service)
    _add_weights(app, service)
    _add_phases(app, service)
    _add_info(app, service)
    add_refusals(app, REFUSED)


def _add_pauses(app: FastAPI, service: GatewayService) -> None:
    @app.post("/pause")
    async def pause(
        http: Request,
        mode: Annotated[PauseMode, Query()] = PauseMode.ABORT,
        clear_cache: Annotated[bool, Query(description="drop the KV of ended chunks; not with keep")] = True,
    ):
        client = service.client(http.scope["role"])
        await client.pause(mode)
        if clear_cache and mode is not PauseMode.KEEP:
            await client.reset_caches()
        return {"status": "paused"}

    @app.post("/resume")
    async def resume(http: Request):
        await service.client(http.scope["role"]).resume()
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused():
        return {"is_paused": (await service.client(Role.OBSERVER).status()).paused}

    @app.post("/inference/v1/abort_requests")
    @app.post("/abort_requests")
    async def abort_requests(http: Request, request_ids: Annotated[list[str] | None, Body(embed=True)] = None):
        if request_ids:
            raise ValueError("request_ids: one request ends when its client hangs up; give none here, to end all")
        return {"status": "aborted", "aborted": await service.client(http.scope["role"]).cancel_all()}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(http: Request, reset_external: Annotated[bool, Query()] = False):
        """Drop the KV of ended chunks, and with `reset_external` the pool's. `success` is false while chunks run."""
        client = service.client(http.scope["role"])
        if reset_external:
            await client.drain_pool()
        return {"success": await client.reset_caches()}


def _add_sleep(app: FastAPI, service: GatewayService) -> None:
    @app.post("/sleep")
    async def sleep(
        http: Request,
        level: Annotated[int, Query(ge=0, le=2, description="0: a pause alone; 1 and 2 are the same here")] = 1,
        mode: Annotated[PauseMode, Query()] = PauseMode.ABORT,
    ):
        client = service.client(http.scope["role"])
        await (client.sleep(mode) if level else client.pause(mode))
        return {"status": "sleeping", "level": level}

    @app.post("/wake_up")
    async def wake_up(http: Request, tags: Annotated[list[str] | None, Query()] = None):
        """Bring back `weights`, `kv_cache`, or both; `scheduling`, vLLM's for a sleep of level 0, ends the pause."""
        client = service.client(http.scope["role"])
        parts = TAGS if tags is None else tuple(tag for tag in tags if tag != "scheduling")
        await client.wake_up(parts)
        asleep = (await client.status()).asleep
        if not asleep:
            await client.resume()
        return {"status": "sleeping" if asleep else "awake", "tags": tags}

    @app.get("/is_sleeping")
    async def is_sleeping():
        return {"is_sleeping": bool((await service.client(Role.OBSERVER).status()).asleep)}


def _add_weights(app: FastAPI, service: GatewayService) -> None:
    @app.post("/update_weights")
    async def update_weights(update: WeightsUpdate, http: Request):
        role = http.scope["role"]
        if update.update_info is None:
            return told(await service.update_weights(role, update.weight_dir, update.version))
        if "source" in update.update_info:
            check_here(named_in_memory(update.update_info))
        await service.client(role).transfer_weights("part", update.update_info)
        return {"message": "Weights updated"}

    @app.post("/update_weight_version")
    async def update_weight_version(http: Request, new_version: Annotated[str, Body(embed=True)]):
        loaded = await service.client(http.scope["role"]).rename_weights(new_version)
        return {"success": True, "new_version": str(loaded.version)}

    @app.get("/weight_info")
    async def weight_info():
        status = await service.client(Role.OBSERVER).status()
        return {"weight_version": str(status.weights_version), "weights_digest": status.weights_digest}

    @app.post("/weight_checker")
    async def weight_checker(
        http: Request,
        action: Annotated[Literal["checksum", "reset", "compare"], Body(embed=True)],
        baseline: Annotated[dict[str, str] | None, Body(embed=True)] = None,
    ):
        """Return checksums of the weights that every replica computes with, read back; or compare them with a
        baseline.
        """
        if action == "reset":
            raise ValueError("action: reset would fill the model with chance; a service in use keeps its weights")
        if action == "compare" and baseline is None:
            raise ValueError("action: compare needs a baseline, the checksums of an earlier answer")
        found = await service.client(http.scope["role"]).check_weights()
        unlike = {name for names in found.unlike.values() for name in names}
        if action == "checksum":
            named = {"weight_version": str(found.version), "weights_digest": found.digest}
            return {"checksums": found.checksums, "mismatches": sorted(unlike), "replicas": len(found.replicas)} | named
        names = found.checksums.keys() | baseline.keys()
        unlike |= {name for name in names if found.checksums.get(name) != baseline.get(name)}
        return {"match": not unlike, "mismatches": sorted(unlike)}

    @app.post("/weight_slots")
    async def weight_slots(http: Request):
        """Return the name of the slots in this machine's shared memory where a trainer stages weights for
        `update_info`.
        """
        return {"slots": await service.client(http.scope["role"]).own_slots()}


def _add_phases(app: FastAPI, service: GatewayService) -> None:
    @app.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(http: Request, init_info: Annotated[dict[str, Any], Body(embed=True)]):
        if backend_of(init_info)[0] == "ipc":
            raise ValueError(
                "init_info: IPC's handles come pickled over HTTP, and nothing is unpickled here; use "
                f"RayVLLMWeightSyncClient, or {MEMORY} on one machine (docs/http.md)"
            )
        await service.client(http.scope["role"]).transfer_weights("init", init_info)
        return {"message": "Weight transfer initialized"}

    @app.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine(http: Request):
        await service.client(http.scope["role"]).transfer_weights("shutdown")
        return {"message": "Weight transfer shut down"}

    @app.post("/start_weight_update")
    async def start_weight_update(http: Request, start: UpdateStart | None = None):
        await service.client(http.scope["role"]).transfer_weights("start")
        return {"message": "Weight update started"}

    @app.post("/finish_weight_update")
    async def finish_weight_update(http: Request, finish: UpdateFinish | None = None):
        version = None if finish is None else version_of(finish.weight_version)
        loaded = await service.client(http.scope["role"]).finish_transfer(version)
        return {"message": "Weight update finished", "weight_version": str(loaded.version)}


def _add_info(app: FastAPI, service: GatewayService) -> None:
    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info():
        """Return what clients read of vLLM's `/server_info`, and of SGLang's: sizes in workers of the engines."""
        status, model = await service.client(Role.OBSERVER).status(), await service.model()
        ranks = [one.ranks for one in status.replicas]
        return {
            "tp_size": max(ranks, default=1),
            "pp_size": 1,
            "dp_size": len(ranks),
            "num_gpus": sum(ranks),
            "enable_memory_saver": False,
            "tailrace": app.version,
            "model": model.root,
            "max_model_len": model.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "weights_version": status.weights_version,
            "replicas": len(status.replicas),
            "vllm_config": vllm_config(model, status),
        }

    @app.get("/get_world_size")
    async def get_world_size(include_dp: Annotated[bool, Query()] = True):
        """Return the number of workers of all replicas, or of one without `include_dp`."""
        ranks = [one.ranks for one in (await service.client(Role.OBSERVER).status()).replicas]
        return {"world_size": sum(ranks) if include_dp else max(ranks, default=1)}
