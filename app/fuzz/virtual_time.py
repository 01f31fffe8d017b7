"""An event loop on a virtual clock, and processes: groups of tasks that die together.

Invariant: one thread, and time passes only while nothing can run; so a run is a function of its seed.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context

PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)
"""The process whose code runs now; tasks inherit it."""


class Deadlock(RuntimeError):
    """Nothing can run and no timer is set: the run would never end."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Time advances to the next timer at once. `errors`: asyncio's reports of exceptions that were never read."""

    def __init__(self):
        super().__init__()
        self._now_s = 0.0
        self._selector = self  # BaseEventLoop asks it for events, and for how long to wait
        self.errors: list[str] = []
        self.set_task_factory(_task)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> tuple:
        """Called by BaseEventLoop when nothing is ready before `timeout` seconds from now."""
        if timeout is None:
            raise Deadlock("nothing can run, and no timer is set")
        self._now_s += timeout
        return ()

    def run_in_executor(self, executor, func: Callable, *args):
        """Runs the function now: there is no other thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future

    def _process_events(self, events) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _note(self, loop, context: dict) -> None:
        self.errors.append(f"{context['message']}: {context.get('exception')!r}")


def _task(loop, coroutine: Coroutine, **options) -> asyncio.Task:
    task = asyncio.Task(coroutine, loop=loop, **options)
    context = options.get("context")
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task


class Process:
    """A process of the cluster, by name. `died`: done once it is dead."""

    def __init__(self, name: str):
        self.name, self.alive = name, True
        self.tasks: set[asyncio.Task] = set()
        self.died = asyncio.get_running_loop().create_future()

    def spawn(self, coroutine: Coroutine) -> asyncio.Task:
        """Starts a task in this process."""
        context = copy_context()
        context.run(PROCESS.set, self)
        return asyncio.get_running_loop().create_task(coroutine, context=context)

    def run(self, function: Callable, *args):
        """Runs a plain function in this process: its tasks belong here."""
        context = copy_context()
        context.run(PROCESS.set, self)
        return context.run(function, *args)

    def kill(self) -> None:
        """As SIGKILL: none of its tasks continues. Callers see `died`."""
        if not self.alive:
            return
        self.alive = False
        for task in list(self.tasks):
            task.cancel()
        self.died.set_result(None)


def caller_is_dead() -> bool:
    process = PROCESS.get()
    return process is not None and not process.alive
