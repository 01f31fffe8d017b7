"""Pieces of streamed messages: what is joined, and what a client sees."""

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
