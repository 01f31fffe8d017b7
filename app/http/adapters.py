"""LoRA adapters over HTTP, by vLLM's routes."""

from tailrace.app.calls.refused import AdapterRejected, RolloutRejected
from tailrace.app.http.gateway_connection import GatewayConnection
from tailrace.app.http.refused import GivenUp
from tailrace.deployments.messages.adapters import Adapter


class GatewayAdapters:
    """The calls of `AdapterCalls`."""

    def __init__(self, connection: GatewayConnection):
        self._connection = connection

    async def load(self, name: str, path: str) -> Adapter:
        await self._tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), "load_inplace": True})
        found = next((one for one in await self.adapters() if one.name == name), None)
        if found is None:
            raise AdapterRejected(f"adapter {name!r} was loaded, and unloaded by another client")
        return found

    async def unload(self, name: str) -> None:
        await self._tell("/v1/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> tuple[Adapter, ...]:
        entries = (await self._connection.ask("GET", "/v1/models"))["data"]
        return tuple(Adapter(one["id"], path=one["root"], **one["tailrace"]) for one in entries if one["parent"])

    async def _tell(self, path: str, body: dict) -> None:
        try:
            await self._connection.tell(path, body)
        except (RolloutRejected, GivenUp) as error:
            raise AdapterRejected(str(error)) from error
