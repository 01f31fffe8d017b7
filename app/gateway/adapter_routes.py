"""Routes by which trainers load LoRA adapters: vLLM 0.32's `/v1/load_lora_adapter`, `/v1/unload_lora_adapter`.

The trainers prime-rl and SkyRL replace an adapter of the same name. Invariant: a load that fails leaves the name as it
was. Source of formats and texts: vLLM's `entrypoints/serve/lora`, `entrypoints/openai/models/serving.py`.
"""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import Field

from tailrace.app.gateway.edge.errors import error_body
from tailrace.app.gateway.edge.fields import RequestBody
from tailrace.app.gateway.service import GatewayService
from tailrace.deployments.messages.roles import Role

IN_PLACE = ("/load_lora_adapter", "/skyrl/v1/load_lora_adapter")


class AdapterLoad(RequestBody):
    """`lora_path`: an absolute folder in PEFT's format that every replica can read. `load_inplace`: a loaded name may
    get another content, as its next version.
    """

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class AdapterUnload(RequestBody):
    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None


def add_adapters(app: FastAPI, service: GatewayService) -> None:
    async def load(request: AdapterLoad, http: Request):
        if request.is_3d_lora_weight:
            raise ValueError("is_3d_lora_weight: adapters of experts are taken in PEFT's form alone; remove it")
        await service.client(http.scope["role"]).load_adapter(request.lora_name, request.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: AdapterLoad, http: Request):
        """Load an adapter under a name. A name that is loaded needs `load_inplace`."""
        if not request.load_inplace and request.lora_name in await names(service):
            raise ValueError(
                f"The lora adapter '{request.lora_name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True."
            )
        return await load(request, http)

    for path in IN_PLACE:
        app.add_api_route(path, load, methods=["POST"], summary="Load an adapter, or its next version")

    @app.post("/v1/unload_lora_adapter")
    @app.post("/unload_lora_adapter")
    async def unload_lora_adapter(request: AdapterUnload, http: Request):
        """Remove an adapter. Samples in flight end with it."""
        client = service.client(http.scope["role"])
        if request.lora_name not in await names(service):
            text = f"The lora adapter '{request.lora_name}' cannot be found."
            return JSONResponse(error_body(404, text), 404)
        await client.unload_adapter(request.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


async def names(service: GatewayService) -> set[str]:
    return {one.name for one in await service.client(Role.OBSERVER).adapters()}
