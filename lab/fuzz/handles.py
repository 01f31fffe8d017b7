"""Simulated Serve handles and Ray actor handles: calls between simulated processes, with faults on the way.

As with Ray, a dead callee ends a call in RayActorError. A caller that leaves cancels its call, unless it is dead
itself. An exception of the callee arrives as a RayTaskError that is also an instance of its cause.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from random import Random

from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    RayActorError,
    RaySystemError,
    RayTaskError,
    TaskCancelledError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from tailrace.deployments.router import ReplicaGone
from tailrace.lab.fuzz.replica import SimulatedReplica
from tailrace.lab.fuzz.virtual_time import Process, caller_is_dead

PARTED_S = 73.0
"""Seconds of a host's silence after which Ray takes its actors for dead."""

RAY_ERRORS = (
    lambda: ObjectLostError("ab" * 28, None, ""),
    lambda: RaySystemError("the object store is full"),
    lambda: asyncio.CancelledError("Serve's form of TaskCancelledError"),
    TaskCancelledError,
    lambda: ActorUnavailableError("unavailable", None),
    lambda: OSError(28, "No space left on device"),
    lambda: BackPressureError(num_queued_requests=1, max_queued_requests=0),
    lambda: RayTaskError("generate_chunk", "Traceback\nMemoryError: out of memory", MemoryError("out of memory")),
)


async def call(callee: Process, work: Callable):
    """Runs `work()` in process `callee`, once a message can pass."""
    if not callee.reachable:
        await _answer(callee, asyncio.ensure_future(callee.reached()))
    if not callee.alive:
        raise RayActorError()
    task = callee.spawn(_as_ray(work))
    try:
        return await _answer(callee, task)
    except asyncio.CancelledError:
        if not caller_is_dead():
            task.cancel()
        raise


def _answer(callee: Process, task: asyncio.Task) -> asyncio.Future:
    """Returns the end of a task that needs `callee`, or RayActorError once `callee` is dead."""
    answer = asyncio.get_running_loop().create_future()

    def settle(ended: asyncio.Future) -> None:
        callee.died.remove_done_callback(settle)
        error = RayActorError() if not task.done() or task.cancelled() else task.exception()
        task.cancel()
        if answer.done():  # its caller has left
            return
        if error is None and callee.alive:
            answer.set_result(task.result())
        else:
            answer.set_exception(error or RayActorError())

    task.add_done_callback(settle)
    callee.died.add_done_callback(settle)
    return answer


async def _as_ray(work: Callable):
    try:
        return await work()
    except Exception as error:  # noqa: BLE001 - as Ray: any exception of the callee goes to the caller
        raise task_error(error) from None


def task_error(error: Exception) -> Exception:
    """Returns an exception of a callee as Ray gives it to the caller. Ray would look up the present process and
    address."""
    text = f"Traceback\n{type(error).__name__}: {error}"
    wrapped = RayTaskError("method", text, error, proctitle="simulated", pid=1, ip="127.0.0.1")
    return wrapped.as_instanceof_cause()


class EngineHandle:
    """The handle of the Engine deployment. `replicas`: the running ones by name, as the controller knows them."""

    def __init__(self, replicas: dict[str, SimulatedReplica], rng: Random):
        self._replicas, self._rng = replicas, rng

    def options(self, session_id: str, method_name: str) -> "Method":
        return Method(partial(self._call, session_id, method_name))

    def broadcast(self, method: str, *args) -> "Broadcast":
        return Broadcast(partial(self._all, method, args))

    def running(self) -> list[str]:
        return [replica.name for replica in self._replicas.values() if not replica.stopping]

    async def _call(self, name: str, method: str, *args):
        replica = self._replicas.get(name)
        if replica is None or replica.stopping:
            raise ReplicaGone(f"replica {name!r} is not running; call to {method!r} was not sent")
        await asyncio.sleep(self._rng.random() * 0.05)
        work = partial(getattr(replica.shell, method), *args)
        answer = self._parted(replica, call(replica, work))
        return await (_held(replica, answer) if method == "hold_line" else answer)

    async def _parted(self, replica: SimulatedReplica, coroutine):
        """Returns the call's answer. Raises RayActorError if the replica's host is cut off for longer than Ray
        waits."""
        task = asyncio.ensure_future(coroutine)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # not read if its caller dies
        now = asyncio.get_running_loop().time
        try:
            while True:
                await asyncio.wait({task}, timeout=PARTED_S)
                left_s = replica.parted_until_s - now()
                if left_s > PARTED_S or (left_s > 0 and not task.done()):
                    raise RayActorError()  # the call itself continues there
                if task.done() and left_s <= 0:
                    return task.result()
                await asyncio.sleep(max(0.0, left_s))
        except asyncio.CancelledError:
            if not caller_is_dead():
                task.cancel()
            raise

    async def _all(self, method: str, args: tuple, timeout_s: float, return_exceptions: bool) -> list:
        replicas = [replica for replica in self._replicas.values() if not replica.stopping]
        if not replicas:
            raise DeploymentUnavailableError("Engine")
        calls = [asyncio.ensure_future(self._call(replica.name, method, *args)) for replica in replicas]
        for one in calls:
            one.add_done_callback(lambda done: done.cancelled() or done.exception())
        _, pending = await asyncio.wait(calls, timeout=timeout_s)
        for late in pending:
            late.cancel()
        if pending:
            raise TimeoutError
        return [one.exception() or one.result() for one in calls]


async def _held(replica: SimulatedReplica, answer: Coroutine):
    """Awaits the call that holds a line. Raises an error of Ray if a fault gives one; the call then continues at the
    replica."""
    task, error = asyncio.ensure_future(answer), asyncio.ensure_future(replica.hold_errors.get())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({task, error}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if not caller_is_dead():
            task.cancel()
        raise
    finally:
        if not error.done():
            error.cancel()
    if task.done():
        return task.result()
    raise RAY_ERRORS[error.result() % len(RAY_ERRORS)]()


class Method:
    """`handle.method`, with or without options."""

    def __init__(self, start: Callable):
        self._start = start

    def remote(self, *args):
        call = asyncio.ensure_future(self._start(*args))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # as Serve: it need not be read
        return call

    def options(self, **options) -> "Method":
        return self


class Broadcast:
    def __init__(self, start: Callable):
        self._start = start

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list:
        return await self._start(timeout_s=timeout_s, return_exceptions=return_exceptions)


class IngressHandle:
    """The handle of the application. `present`: returns the coordinator's process and object, once it is up."""

    def __init__(self, present: Callable, stream: bool = False):
        self._present, self._stream = present, stream

    def options(self, stream: bool) -> "IngressHandle":
        return IngressHandle(self._present, stream)

    def __getattr__(self, name: str):
        return Streamed(self._present, name) if self._stream else Method(partial(self._call, name))

    async def _call(self, name: str, *args):
        process, coordinator = await self._present()
        return await call(process, partial(getattr(coordinator, name), *args))


class Streamed:
    def __init__(self, present: Callable, name: str):
        self._present, self._name = present, name

    def remote(self, *args) -> "Stream":
        return Stream(self._present, self._name, args)


class Stream:
    """A streaming call: the callee runs ahead of the reader, and continues when the reader is gone."""

    def __init__(self, present: Callable, name: str, args: tuple):
        self._items: asyncio.Queue = asyncio.Queue()
        self._started = asyncio.ensure_future(self._start(present, name, args))
        self._process: Process | None = None
        self._task: asyncio.Task | None = None

    async def _start(self, present: Callable, name: str, args: tuple) -> None:
        self._process, coordinator = await present()
        self._task = self._process.spawn(self._pump(getattr(coordinator, name)(*args)))

    async def _pump(self, opening: Awaitable[AsyncIterator]) -> None:
        try:
            async for item in await opening:
                self._items.put_nowait(item)
            self._items.put_nowait(StopAsyncIteration())
        except Exception as error:  # noqa: BLE001 - goes to the reader
            self._items.put_nowait(task_error(error))

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self):
        await self._started
        waiting = asyncio.ensure_future(self._items.get())
        await asyncio.wait({waiting, self._process.died}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            raise RayActorError()
        item = waiting.result()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self._started.cancel()
        if self._task is not None:
            self._task.cancel()


class ActorHandle:
    """A Ray actor as `handle.METHOD.remote(...)`, on `actor`, a plain object with async methods in `process`."""

    def __init__(self, process: Process, actor, rng: Random):
        self._process, self._actor, self._rng = process, actor, rng

    def __getattr__(self, name: str) -> Method:
        return Method(partial(self._call, name))

    async def _call(self, name: str, *args):
        await asyncio.sleep(self._rng.random() * 0.02)
        if self._actor.problem == "odd":
            raise self._rng.choice(RAY_ERRORS)()
        return await call(self._process, partial(getattr(self._actor, name), *args))
