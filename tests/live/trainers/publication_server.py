"""The coordinator's book of publications behind a socket, for ranks that are processes; loads are recorded."""

import asyncio
import threading
from collections.abc import Callable
from multiprocessing.connection import Listener

from tailrace.deployments.coordinator.publications import Publications
from tailrace.deployments.messages.rollout import WeightsLoaded


class PublicationServer:
    """`on_load`: called with the version, before a load is answered. `pids`: process ids of ranks, as they called."""

    def __init__(self, on_load: Callable[[int], None] = lambda version: None):
        self.loads: list[tuple] = []
        self.pids: dict[int, int] = {}
        self._on_load = on_load
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._book = Publications(lambda: 0, self._load, self._loop.create_task, looked=lambda: asyncio.sleep(0))
        self._listener = Listener(authkey=b"test", family="AF_UNIX")
        self.address = self._listener.address
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            threading.Thread(target=self._answer, args=(self._listener.accept(),), daemon=True).start()

    def _answer(self, line) -> None:
        pid, phase, version, rank, content = line.recv()
        self.pids[rank] = pid
        call = self._book.run(phase, version, rank, content)
        answer = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        try:
            line.send(answer)
        except OSError:  # the rank is dead
            line.close()

    async def _load(self, version, source, digest, score):
        self.loads.append((version, source))
        self._on_load(version)
        await asyncio.sleep(0.2)
        return WeightsLoaded(version=version, digest=digest, replicas=())
