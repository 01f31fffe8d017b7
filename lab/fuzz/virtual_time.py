"""An event loop on a virtual clock, and processes: groups of tasks that die together.

Invariant: there is one thread, and time passes only while nothing can run, so a run is a function of its seed.
"""

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from random import Random

PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)
"""The process whose code runs now; tasks inherit it."""


LAST_S = 20_000.0
"""Virtual seconds after which a run is taken for endless: the longest run lasts 5,000."""


class Deadlock(RuntimeError):
    """A run that would never end: nothing can run and no timer is set, or the time is past `LAST_S`."""


class Callback:
    """A call that the loop will make, unless it is cancelled. Replaces asyncio's Handle and TimerHandle."""

    __slots__ = ("args", "context", "function", "when_s")

    def __init__(self, function: Callable, args: tuple, context: Context | None, when_s: float):
        self.function, self.args, self.when_s = function, args, when_s
        self.context = copy_context() if context is None else context

    def cancel(self) -> None:
        self.function = self.args = None

    def cancelled(self) -> bool:
        return self.function is None

    def when(self) -> float:
        return self.when_s


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time advances to the next timer at once. `errors`: asyncio's reports of exceptions that were
    never read.

    Timers of the same time run in the order in which they were set. With `orders`, calls that are due at one instant
    run in any order that real processes allow: the calls of each process keep their order, timers of the same time have
    none.
    """

    def __init__(self, orders: Random | None = None):
        super().__init__()
        self._orders = orders
        self._now_s = 0.0
        self._timers: list[tuple[float, int, Callback]] = []
        self._set = 0  # timers so far
        self.errors: list[str] = []
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Callable, *args, context: Context | None = None) -> Callback:
        call = Callback(callback, args, context, self._now_s)
        self._ready.append(call)
        return call

    call_soon_threadsafe = call_soon  # there is no other thread

    def call_later(self, delay: float, callback: Callable, *args, context: Context | None = None) -> Callback:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable, *args, context: Context | None = None) -> Callback:
        call = Callback(callback, args, context, when)
        self._set += 1
        heapq.heappush(self._timers, (when, self._set, call))
        return call

    def create_task(self, coroutine: Coroutine, *, name=None, context: Context | None = None) -> asyncio.Task:
        task = asyncio.Task(coroutine, loop=self, name=name, context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(process.tasks.pop)
        return task

    def run_in_executor(self, executor, func: Callable, *args):
        """Runs the function now: there is no other thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        """Runs until the loop stops. BaseEventLoop calls it again and again until then."""
        ready = self._ready
        while not self._stopping:
            if not ready:
                self._advance()
            call = ready.popleft() if self._orders is None else self._any_next()
            if call.function is None:
                continue
            try:
                call.context.run(call.function, *call.args)
            except Exception as error:  # noqa: BLE001 - as asyncio's Handle does
                self.call_exception_handler({"message": f"{call.function} raised", "exception": error})

    def _advance(self) -> None:
        """Goes to the time of the next timer. Raises Deadlock."""
        timers = self._timers
        while timers and timers[0][2].function is None:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock("nothing can run, and no timer is set")
        self._now_s = max(self._now_s, timers[0][0])
        if self._now_s > LAST_S:
            raise Deadlock(f"still running at {self._now_s:.0f} s: " + "; ".join(sorted(_places(self))))
        due = []
        while timers and timers[0][0] <= self._now_s:
            due.append(heapq.heappop(timers)[2])
        if self._orders is not None:
            self._orders.shuffle(due)
        self._ready += due

    def _any_next(self) -> Callback:
        """Returns the first call of a process that the stream of orders chooses."""
        ready, firsts = self._ready, {}
        for place, call in enumerate(ready):
            firsts.setdefault(call.context.get(PROCESS), place)
        place = self._orders.choice(list(firsts.values()))
        ready.rotate(-place)
        call = ready.popleft()
        ready.rotate(place)
        return call

    def _note(self, loop, context: dict) -> None:
        self.errors.append(f"{context['message']}: {context.get('exception')!r}")


def _places(loop: VirtualLoop) -> set[str]:
    """Returns where the tasks of a loop wait: the functions and lines of each, from the task's own to the innermost."""
    return {" > ".join(_waits(task.get_coro())) for task in asyncio.all_tasks(loop)}


def _waits(coroutine) -> Iterator[str]:
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield f"{coroutine.__qualname__}:{frame.f_lineno}"
        coroutine = coroutine.cr_await


class Process:
    """A process of the cluster, by name. `died`: done once it is dead. `reachable`: whether a message to it arrives at
    once."""

    reachable = True

    def __init__(self, name: str):
        self.name, self.alive = name, True
        self.tasks: dict[asyncio.Task, None] = {}  # an ordered set: the same seed gives the same history
        self.died = asyncio.get_running_loop().create_future()

    def spawn(self, coroutine: Coroutine) -> asyncio.Task:
        """Starts a task in this process."""
        context = copy_context()
        context.run(PROCESS.set, self)
        return asyncio.get_running_loop().create_task(coroutine, context=context)

    def run(self, function: Callable, *args):
        """Runs a plain function in this process: its tasks belong to it."""
        context = copy_context()
        context.run(PROCESS.set, self)
        return context.run(function, *args)

    async def reached(self) -> None:
        """Returns when a message can pass and is taken."""

    def kill(self) -> None:
        """Kills the process, as SIGKILL does: none of its tasks continues. Callers see `died`."""
        if not self.alive:
            return
        self.alive = False
        for task in list(self.tasks):
            task.cancel()
        self.died.set_result(None)


def caller_is_dead() -> bool:
    process = PROCESS.get()
    return process is not None and not process.alive
