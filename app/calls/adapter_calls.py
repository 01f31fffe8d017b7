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
    """`_ask` and `status` are the client's; `_adapters`: by name, of its loads."""

    _adapters: dict[str, Adapter]

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Load the adapter in the absolute folder `path` on every replica, and name it.

        The folder has PEFT's adapter_config.json and adapter_model.safetensors. The same content again changes nothing,
        so a call may be repeated; another content is the next version of the name, for the samples that come from now
        on: those in flight end with the one that they began with, so keep its folder for as long. Returns its version
        and digest. Raises AdapterRejected, with the reason; the name then keeps its content.
        """
        answer = await self._ask("load_adapter", name, path)
        if isinstance(answer, Rejected):
            raise AdapterRejected(answer.reason)
        self._adapters[name] = answer
        return answer

    load_adapter_blocking = blocking(load_adapter)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter's name. Samples in flight end with it. Raises AdapterRejected if it is not loaded."""
        self._adapters.pop(name, None)
        answer = await self._ask("unload_adapter", name)
        if isinstance(answer, Rejected):
            raise AdapterRejected(answer.reason)

    unload_adapter_blocking = blocking(unload_adapter)

    async def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests may name."""
        return (await self.status()).adapters

    adapters_blocking = blocking(adapters)

    async def _load_again(self, names: Iterable[str | None]) -> bool:
        """Load those of these adapters again that this client has loaded and the service has not: it was restarted.
        Returns whether there is one of this client's, and the service has all of these by then; nothing is loaded if it
        lacks another one."""
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
        """Versions of adapters, by name, that the coordinator must hold: of this client's last loads, or higher."""
        own = {name: adapter.version for name, adapter in self._adapters.items()}
        return own | {n: max(v, own.get(n, 0)) for n, v in settings.min_adapter_versions.items()}
