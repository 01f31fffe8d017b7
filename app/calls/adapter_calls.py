"""The calls of `RolloutClient` for adapters of LoRA. Of `client.py`, which has the handle and the roles.

await client.load_adapter("poet", "/adapters/poet-7")       # a folder of PEFT's form, which every replica can read
PromptGroup(prompt_id="sky", text="Why is the sky blue?", adapter="poet")
await client.unload_adapter("poet")
"""

from collections.abc import Iterable

from tailrace.app.calls.blocking import blocking
from tailrace.app.calls.refused import AdapterRejected
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.rollout import BatchSettings, Rejected


class AdapterCalls:
    """`_ask` and `status` belong to the client. `_adapters`: adapters that it has loaded, by name."""

    _adapters: dict[str, Adapter]

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Loads the adapter in the absolute folder `path` on every replica, under a name.

        The folder has PEFT's adapter_config.json and adapter_model.safetensors. The same content again changes nothing,
        so a call may be repeated. Another content is the next version of the name, for samples that arrive later;
        samples in flight end with their own, so keep its folder until then. Returns its version and digest. Raises
        AdapterRejected, with the reason; the name then keeps its content.
        """
        answer = await self._ask("load_adapter", name, path)
        if isinstance(answer, Rejected):
            raise AdapterRejected(answer.reason)
        self._adapters[name] = answer
        return answer

    load_adapter_blocking = blocking(load_adapter)

    async def unload_adapter(self, name: str) -> None:
        """Removes an adapter's name. Samples in flight end with it. Raises AdapterRejected if it is not loaded."""
        self._adapters.pop(name, None)
        answer = await self._ask("unload_adapter", name)
        if isinstance(answer, Rejected):
            raise AdapterRejected(answer.reason)

    unload_adapter_blocking = blocking(unload_adapter)

    async def adapters(self) -> tuple[Adapter, ...]:
        """Returns the adapters that requests may name."""
        return (await self.status()).adapters

    adapters_blocking = blocking(adapters)

    async def _load_again(self, names: Iterable[str | None]) -> bool:
        """Loads again those of these adapters that this client has loaded and the service, since a restart, has not.
        Returns True if one is this client's and the service now has all of them; nothing is loaded if it lacks another
        one.
        """
        wanted = dict.fromkeys(name for name in names if name is not None)
        if not self._adapters.keys() & wanted.keys():
            return False
        held = {adapter.name: adapter.version for adapter in await self.adapters()}
        own = {name: self._adapters[name] for name in wanted if name in self._adapters}
        if not wanted.keys() <= held.keys() | own.keys():
            return False
        for name, adapter in own.items():
            if held.get(name, 0) < adapter.version:
                await self.load_adapter(name, adapter.path)
        return True

    def _min_adapter_versions(self, settings: BatchSettings) -> dict[str, int]:
        """Returns minimum versions of adapters, by name, that the coordinator must hold: those of this client's last
        loads, or higher.
        """
        own = {name: adapter.version for name, adapter in self._adapters.items()}
        return own | {n: max(v, own.get(n, 0)) for n, v in settings.min_adapter_versions.items()}
