"""Answers of one engine in this process to chunks that are all submitted at once. Used by live tests."""

from queue import Queue

ANSWER_S = 120
"""A test that waits longer has found a hang."""


def run(engine, *chunks) -> list:
    """All chunks at once; their results or exceptions in order."""
    boxes = [Queue() for _ in chunks]
    for one, box in zip(chunks, boxes, strict=True):
        engine.submit(one, box.put)
    return [box.get(timeout=ANSWER_S) for box in boxes]
