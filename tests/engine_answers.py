"""Answers of one engine in this process to chunks that are all submitted at once. Used by live tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from threading import Event

ANSWER_S = 120
"""A test that waits longer has found a hang."""


def run(engine, *chunks) -> list:
    """All chunks at once; their results or exceptions in order."""
    boxes = [Queue() for _ in chunks]
    for one, box in zip(chunks, boxes, strict=True):
        engine.submit(one, box.put)
    return [box.get(timeout=ANSWER_S) for box in boxes]


@contextmanager
def held(engine, is_due: Callable[[], bool] = lambda: True) -> Iterator[Event]:
    """The engine makes no step from the first one on at which `is_due`, until the block ends: all later calls of the
    block come between two steps, however late this thread gets its core. Yields an event, set once the engine waits.
    """
    step, waits, goes_on = engine._stepper.step, Event(), Event()

    def held_step():
        if not goes_on.is_set() and is_due():
            waits.set()
            goes_on.wait(ANSWER_S)
        return step()

    engine._stepper.step = held_step
    try:
        yield waits
    finally:
        goes_on.set()
        engine._stepper.step = step
