"""LoRA adapters over HTTP: the calls of `RolloutClient` by vLLM's routes. A part of `client.py`, which sends
requests.
"""

from tailrace.app.calls.adapter_calls import AdapterCalls
from tailrace.app.calls.blocking import blocking
from tailrace.app.calls.refused import AdapterRejected, RolloutRejected
from tailrace.app.http.refused import LOST, GivenUp, error_of, lost
from tailrace.deployments.messages.adapters import Adapter


class HttpAdapterCalls(AdapterCalls):
    """`_patiently`, `_ask`, `_url` and `_connections` belong to the client."""

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Loads an adapter's folder on every replica, under a name; see `RolloutClient.load_adapter`. Its path is the
        service's, and absolute. Raises AdapterRejected, with the reason.
        """
        await self._steer("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), "load_inplace": True})
        found = next((one for one in await self.adapters() if one.name == name), None)
        if found is None:
            raise AdapterRejected(f"adapter {name!r} was loaded, and unloaded by another client")
        self._adapters[name] = found
        return found

    load_adapter_blocking = blocking(load_adapter)

    async def unload_adapter(self, name: str) -> None:
        """Removes an adapter's name; see `RolloutClient.unload_adapter`. Raises AdapterRejected if it is not loaded."""
        self._adapters.pop(name, None)
        await self._steer("/v1/unload_lora_adapter", {"lora_name": name})

    unload_adapter_blocking = blocking(unload_adapter)

    async def adapters(self) -> tuple[Adapter, ...]:
        """Returns the adapters that requests may name."""
        entries = (await self._ask("GET", "/v1/models"))["data"]
        return tuple(Adapter(one["id"], path=one["root"], **one["tailrace"]) for one in entries if one["parent"])

    adapters_blocking = blocking(adapters)

    async def _steer(self, path: str, body: dict) -> None:
        try:
            await self._patiently(self._send, path, body)
        except (RolloutRejected, GivenUp) as error:
            raise AdapterRejected(str(error)) from error

    async def _send(self, path: str, body: dict) -> None:
        """Sends one request, whose answer is vLLM's text."""
        try:
            answer = await self._connections.ask("POST", path, body, {})
        except LOST as error:
            raise lost(self._url, error) from error
        if not answer.is_success:
            raise error_of(answer)
