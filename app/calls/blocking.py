"""Blocking twins of coroutines and async iterators, for drivers without an event loop and for those inside one.

Each call runs on an event loop of a separate thread, so it works from any thread, also from one whose own loop is
running (which it then blocks). Called by `app.calls.client` and `app.weights.publish`.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial, wraps
from queue import Queue
from typing import Any, ParamSpec, TypeVar

P, T = ParamSpec("P"), TypeVar("T")


def blocking(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Returns a function that runs the coroutine to its end and returns its result, or raises its error."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        results: Queue = Queue(1)

        def run() -> None:
            try:
                results.put((asyncio.run(method(*args, **kwargs)), None))
            except BaseException as error:  # noqa: BLE001 - the edge of the thread: raised again in the caller's
                results.put((None, error))

        threading.Thread(target=run, daemon=True, name=method.__name__).start()
        value, error = results.get()
        if error is not None:
            raise error
        return value

    return _renamed(call, method)


def blocking_iterator(method: Callable[P, AsyncIterator[T]]) -> Callable[P, Iterator[T]]:
    """Returns a function that returns a generator over the items of the async iterator, which is asked for an item when
    the generator is: else all groups of a batch would wait here for a slow caller. Closing the generator closes the
    iterator.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return _drained(method(*args, **kwargs))

    return _renamed(call, method)


def _renamed(call: Callable, method: Callable) -> Callable:
    call.__name__ = f"{method.__name__}_blocking"
    call.__qualname__ = f"{method.__qualname__}_blocking"
    call.__doc__ = f"Blocking twin of `{method.__name__}`. {method.__doc__ or ''}"
    del call.__wrapped__  # `inspect` would take it for the coroutine function
    return call


def _drained(iterator: AsyncIterator[T]) -> Iterator[T]:
    items: Queue = Queue()
    loop = asyncio.new_event_loop()
    done, asked = object(), asyncio.Event()

    async def pump() -> None:
        try:
            while True:
                await asked.wait()
                asked.clear()
                items.put(await anext(iterator))
        except StopAsyncIteration:
            pass
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: raised again in the caller's
            items.put(error)
        finally:
            await iterator.aclose()
            items.put(done)

    thread = threading.Thread(target=lambda: loop.run_until_complete(task), daemon=True, name="stream")
    task = loop.create_task(pump())
    thread.start()
    made_in = os.getpid()
    try:
        while (item := _next_of(items, made_in, partial(loop.call_soon_threadsafe, asked.set))) is not done:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        if os.getpid() == made_in:  # a forked process shares the loop's sockets, and has no such thread
            loop.call_soon_threadsafe(task.cancel)
            thread.join()
            loop.close()


def _next_of(items: Queue, made_in: int, ask: Callable[[], object]):
    """Asks for the next item and returns it. Raises RuntimeError in a forked process, which would wait for ever."""
    if os.getpid() != made_in:
        raise RuntimeError("the iterator is of the process that this one was forked from; make one here")
    ask()
    return items.get()
