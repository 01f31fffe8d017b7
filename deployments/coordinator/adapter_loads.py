"""Loads adapters on all replicas, and unloads them, at a driver's call.

Invariant: an adapter's name refers to a content only after every replica that is up has loaded that content, and all of
them have read the same one. A replica that starts later loads it with the first chunk that needs it. Used by
`Rollouts`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING

from tailrace.deployments.batches.adapter_book import AdapterBook
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.command import ForgetAdapter, LoadAdapter, NameAdapter
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import Rejected, RejectedBy
from tailrace.deployments.staging.adapter_folder import adapter_digest

if TYPE_CHECKING:  # it loads Ray, and this class needs none of it
    from tailrace.deployments.coordinator.engine_client import EngineClient

MAX_NAME = 256


class AdapterLoads:
    """`model`: name of the served model, which no adapter may have. `looked`: returns once the replicas' reports have
    been read: an earlier coordinator may have named adapters.
    """

    def __init__(self, engines: "EngineClient", model: str, looked: Callable[[], Awaitable[object]]):
        self._engines, self._model, self._looked = engines, model, looked
        self.book = AdapterBook()
        self._alone = asyncio.Lock()
        self._is_first = True
        self.read = adapter_digest  # reads a folder when no replica is up to do it

    def observe(self, reports: Collection[EngineStats]) -> list[Coroutine]:
        """Takes the first reports of replicas: an earlier coordinator may have named adapters. Returns calls to
        make.
        """
        if not self._is_first or not reports:
            return []
        self._is_first = False
        raised = self.book.adopt(adapter for report in reports for adapter in report.adapters)
        return [self._notify(NameAdapter(adapter)) for adapter in raised]

    async def load(self, name: str, path: str) -> Adapter | Rejected:
        """Has every replica load a folder, then binds `name` to its content. Loading the same content again changes
        nothing.
        """
        if (reason := self._invalid(name, path)) is not None:
            return Rejected(reason=reason)
        await self._looked()
        async with self._alone:
            try:
                found = await self._engines.digests(LoadAdapter(path))
                found = found or {await asyncio.to_thread(self.read, path)}
            except TimeoutError:
                return Rejected(reason=f"adapter {name!r}: {path}: a replica could not load it in time")
            except Exception as error:  # noqa: BLE001 - a replica's refusal, or an error of Ray
                return Rejected(reason=f"adapter {name!r}: {str(error) or one_line(error)}")
            if len(found) > 1:
                return Rejected(reason=f"adapter {name!r}: {path}: replicas read other contents: {sorted(found)}")
            adapter = self.book.take(name, found.pop(), path)
            await self._notify(NameAdapter(adapter))
            return adapter

    async def unload(self, name: str) -> Rejected | None:
        """Unbinds a name. Samples in flight with its content continue."""
        await self._looked()
        async with self._alone:
            if self.book.get(name) is None:
                return Rejected(reason=f"adapter {name!r} is not loaded", by=RejectedBy.ADAPTER)
            self.book.drop(name)
            await self._notify(ForgetAdapter(name))
            return None

    async def _notify(self, command: NameAdapter | ForgetAdapter) -> None:
        """Ask all replicas; one that does not answer reports the names that it knows later."""
        with suppress(TimeoutError):
            await self._engines.ask_all(command)

    def _invalid(self, name: object, path: object) -> str | None:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            return f"adapter name is {str(name)[:80]!r}; give 1 to {MAX_NAME} printable characters"
        if name in (self._model, self._model.rstrip("/").rpartition("/")[2]):
            return f"adapter {name!r}: the served model has this name"
        if not isinstance(path, str) or not path.startswith("/"):
            return f"adapter {name!r}: its folder is {path!r}; give an absolute path that every replica can read"
        return None
