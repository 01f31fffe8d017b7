"""The board's watcher over scripted services."""

import asyncio
import json

from tailrace.app.board import watcher as module
from tailrace.app.board.watcher import Watcher


class Service:
    """A client whose `watch` yields one state, and then waits."""

    def __init__(self):
        self.closed = False

    async def watch(self):
        try:
            yield {"whole": True, "number": 1, "at_s": 1.0, "epoch": "e", "sections": {"service": {"": {"tokens": 3}}}}
            await asyncio.Event().wait()
        finally:
            self.closed = True


async def shows_the_service(watcher: Watcher) -> None:
    async with asyncio.timeout(60):
        async for text in watcher.follow():
            if "service" in json.loads(text)["sections"]:
                return


def test_a_board_that_is_opened_before_the_service_exists_shows_it_once_it_does(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    service, tries = Service(), []

    def client():
        tries.append(True)
        if len(tries) < 3:
            raise RuntimeError("the application is not built yet")
        return service

    async def story():
        watcher = Watcher(client)
        await shows_the_service(watcher)
        watcher.end()
        await asyncio.sleep(0.05)

    asyncio.run(story())
    assert len(tries) == 3 and service.closed


def test_a_board_goes_on_after_serve_has_cancelled_its_call(monkeypatch):
    """As Serve does with calls of a coordinator that it replaces; the board showed its last state for ever."""
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    calls = []

    class Replaced(Service):
        async def watch(self):
            calls.append(True)
            if len(calls) < 3:
                raise asyncio.CancelledError
            async for item in super().watch():
                yield item

    async def story():
        watcher = Watcher(Replaced)
        await shows_the_service(watcher)
        task = watcher._task
        watcher.end()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(story())
    assert len(calls) == 3
