"""Pieces of streamed messages: what is joined, and what a client sees."""

import asyncio
from types import SimpleNamespace

from tailrace.app.gateway.answering import streamed
from tailrace.app.gateway.stream_answers import joined, shown

CALL = {"tool_calls": [{"index": 0}]}
PIECES = [
    {"reasoning": "A "},
    {"reasoning": "lamp?"},
    {"reasoning": "!", "content": "I"},
    {"content": " "},
    {"content": "look."},
    CALL,
]


def test_consecutive_pieces_of_one_kind_are_joined():
    found = list(joined(iter(PIECES)))
    assert found == [{"reasoning": "A lamp?"}, {"reasoning": "!", "content": "I"}, {"content": " look."}, CALL]


def test_thoughts_are_left_out_where_they_are_not_wanted():
    assert list(joined(shown(iter(PIECES), thoughts=False))) == [{"content": "I look."}, CALL]
    assert list(shown(iter(PIECES), thoughts=True)) == PIECES


def test_a_client_that_leaves_before_the_first_event_ends_its_samples():
    """Its request raised RuntimeError: the samples' generator was closed while its first step still ran."""
    ended = []

    async def stream(*_):
        try:
            await asyncio.Event().wait()
            yield
        finally:
            await asyncio.sleep(0)  # as samples are cancelled
            ended.append(True)

    async def receive():
        return {"type": "http.disconnect"}

    http = SimpleNamespace(receive=receive, scope={"role": "evaluator"})
    service, asked = SimpleNamespace(stream=stream), SimpleNamespace(wanted=None, naming=None)
    assert asyncio.run(streamed(service, http, asked)).status_code == 499 and ended == [True]
