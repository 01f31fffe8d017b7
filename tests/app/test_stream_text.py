"""Text of a stream: its pieces joined are the whole text, whatever the pieces are."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tailrace.app.gateway.stream_text import StreamText
from tailrace.deployments.constraints.stop_texts import cut, first_end


def decode(tokens) -> str:
    """A tokenizer of bytes."""
    return bytes(tokens).decode("utf-8", "replace")


def pieces_of(tokens: list[int], seed: int) -> list[list[int]]:
    rng, pieces = Random(seed), []
    while tokens:
        size = rng.randint(0, 7)
        pieces.append(tokens[:size])
        tokens = tokens[size:]
    return pieces


@given(st.text(), st.integers(0, 99))
def test_pieces_joined_are_the_text_and_none_has_half_a_character(text, seed):
    stream, tokens = StreamText(decode), list(text.encode("utf-8", "replace"))
    given = [stream.more(piece) for piece in pieces_of(tokens, seed)]
    assert not [piece for piece in given if "\ufffd" in piece and "\ufffd" not in text]
    assert "".join(given) + stream.end(decode(tokens)) == decode(tokens)
    if "\ufffd" not in text:
        assert text.startswith("".join(given)) and len("".join(given)) >= len(text) - 1, "one token waits"


@given(st.lists(st.integers(0, 255), max_size=60), st.integers(0, 99))
def test_bytes_that_are_no_text_come_as_they_are_decoded(tokens, seed):
    stream = StreamText(decode)
    given = "".join(map(stream.more, pieces_of(tokens, seed)))
    assert decode(tokens).startswith(given) and given + stream.end(decode(tokens)) == decode(tokens)


@given(st.text("abé€", max_size=40), st.lists(st.text("abé€", min_size=1, max_size=4), min_size=1, max_size=3),
       st.integers(0, 99))  # fmt: skip
def test_no_text_beyond_a_stop_is_given(text, stops, seed):
    tokens = list(text.encode())
    end = first_end(tokens, 0, stops, 0, decode)
    tokens = tokens if end is None else tokens[:end]
    whole = cut(tokens, stops, decode)[0] if end is not None else text
    stream = StreamText(decode, stops)
    given = ""
    for piece in pieces_of(tokens, seed):
        given += stream.more(piece)
        assert whole.startswith(given)
    assert given + stream.end(whole) == whole
    assert len(whole) - len(given) <= max(map(len, stops)) or end is not None, "no more is held back than a stop needs"
