"""The adapters that a client has loaded: a service that was restarted without them gets them again."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from tailrace.app.calls.connection import Connection
from tailrace.deployments.messages.adapters import Adapter


class AdapterCalls(Protocol):
    """A service's calls for adapters. `load` and `unload` raise AdapterRejected."""

    async def load(self, name: str, path: str) -> Adapter: ...

    async def unload(self, name: str) -> None: ...

    async def adapters(self) -> tuple[Adapter, ...]: ...


class CoordinatorAdapters:
    """The calls over a handle."""

    def __init__(self, connection: Connection):
        self._connection = connection

    async def load(self, name: str, path: str) -> Adapter:
        return await self._connection.ask("load_adapter", name, path)

    async def unload(self, name: str) -> None:
        await self._connection.ask("unload_adapter", name)

    async def adapters(self) -> tuple[Adapter, ...]:
        return (await self._connection.ask("status")).adapters


class OwnAdapters:
    """`service`: loads them."""

    def __init__(self, service: AdapterCalls):
        self._service = service
        self._own: dict[str, Adapter] = {}

    async def served(self) -> tuple[Adapter, ...]:
        """Returns the adapters that requests may name, this client's and others'."""
        return await self._service.adapters()

    async def load(self, name: str, path: str) -> Adapter:
        """Loads an adapter, and remembers it."""
        adapter = self._own[name] = await self._service.load(name, path)
        return adapter

    async def unload(self, name: str) -> None:
        """Unloads an adapter. It is not loaded again, even if the service refuses."""
        self._own.pop(name, None)
        await self._service.unload(name)

    async def restore(self, names: Iterable[str | None], asked: Mapping[str, int]) -> bool:
        """Loads again those of these adapters that are this client's and that the service has lost.

        Returns True if one is this client's and the service now has all of them, in the minimum versions `asked` by
        name or higher ones; nothing is loaded if it lacks another one.
        """
        wanted = dict.fromkeys(name for name in names if name is not None)
        if not self._own.keys() & wanted.keys():
            return False
        held = {adapter.name: adapter.version for adapter in await self.served()}
        own = {name: self._own[name] for name in wanted if name in self._own}
        if not wanted.keys() <= held.keys() | own.keys():
            return False
        for name, adapter in own.items():
            if held.get(name, 0) < adapter.version:
                held[name] = (await self.load(name, adapter.path)).version
        return all(held[name] >= asked.get(name, 0) for name in wanted)

    def min_versions(self, asked: Mapping[str, int]) -> dict[str, int]:
        """Returns minimum versions by name that the service must hold: those of the last loads, or higher ones."""
        own = {name: adapter.version for name, adapter in self._own.items()}
        return own | {name: max(version, own.get(name, 0)) for name, version in asked.items()}
