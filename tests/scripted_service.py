"""A client over a scripted coordinator, in virtual time: what it asked, and answers in their order."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.lab.fuzz.virtual_time import VirtualLoop


class Lost(ConnectionError):
    """The coordinator is gone."""


class Beats:
    """In the place of a heartbeat's thread: a test calls `beat`."""

    def __init__(self, beat: Callable):
        self.beat, self.stopped = beat, False

    def stop(self) -> None:
        self.stopped = True


class Call:
    """A call under way, or a stream of items."""

    def __init__(self, answer):
        self._answer, self.cancels = answer, 0

    def cancel(self) -> None:
        self.cancels += 1

    def __await__(self):
        return self._whole().__await__()

    async def _whole(self):
        answer = self._answer() if callable(self._answer) else self._answer
        answer = await answer if asyncio.iscoroutine(answer) else answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def __aiter__(self):
        for item in self._answer:
            if isinstance(item, BaseException):
                raise item
            if asyncio.iscoroutine(item):
                await item
            else:
                yield item


class Service:
    """The application's handle. `answers`: of each method in turn, the last one again and again."""

    def __init__(self, **answers):
        self.answers = {name: list(of) for name, of in answers.items()}
        self.asked: list[tuple] = []
        self.calls: list[Call] = []
        self.hearts: list[Beats] = []

    def options(self, stream: bool) -> "Service":
        assert stream is True
        return self

    def __getattr__(self, name: str):
        def remote(*arguments):
            self.asked.append((name, *arguments))
            of = self.answers[name]
            self.calls.append(Call(of.pop(0) if len(of) > 1 else of[0]))
            return self.calls[-1]

        return SimpleNamespace(remote=remote)

    def heart(self, beat: Callable) -> Beats:
        self.hearts.append(Beats(beat))
        return self.hearts[-1]

    def named(self, name: str) -> list[tuple]:
        return [asked[1:] for asked in self.asked if asked[0] == name]


def client_of(service: Service, **options) -> RolloutClient:
    return RolloutClient(handle=service, heartbeat=service.heart, **options)


def run(work):
    loop = VirtualLoop()
    try:
        answer = loop.run_until_complete(work)
        assert loop.errors == []
        return answer
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def loaded(version: int, digest: str = "d") -> WeightsLoaded:
    return WeightsLoaded(version=version, digest=digest, replicas=())
