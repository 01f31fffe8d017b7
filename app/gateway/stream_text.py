"""The text of an answer whose tokens arrive piece by piece.

Invariant: the pieces joined are the answer's text; none has half of a character, and none goes beyond a stop text.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
HALF = "\ufffd"
"""A decoder's mark for the bytes of an incomplete character."""


class StreamText:
    """`stops`: texts that may end the answer.

    The last token may end the answer without being part of its text, or complete a stop text. It is therefore held back
    until the next one, with all characters that may be the start of a stop text.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()):
        self._decode = decode
        self._kept = max((len(stop) - 1 for stop in stops), default=0)
        self._tokens: list[int] = []
        self._last: list[int] = []  # the token that waits
        self._window = self._next_window = 0  # tokens from which on text is decoded: a few known ones come first
        self._known = 0  # characters of the window's text that have been seen
        self._held = ""
        self._given = 0  # characters

    def more(self, token_ids: Sequence[int]) -> str:
        """Returns the text that more tokens make certain: that of all but the last."""
        token_ids = [*self._last, *token_ids]
        token_ids, self._last = token_ids[:-1], token_ids[-1:]
        self._tokens += token_ids
        text = self._decode(self._tokens[self._window :])
        whole = text.rstrip(HALF)
        self._held += whole[self._known :]
        if whole == text and token_ids:
            self._window, self._next_window = self._next_window, len(self._tokens)
            text = self._decode(self._tokens[self._window :])
            self._known = len(text)
        else:
            self._known = max(self._known, len(whole))
        return self._give(self._held[: max(0, len(self._held) - self._kept)])

    def end(self, text: str) -> str:
        """Returns the rest of the whole text."""
        return self._give(text[self._given :])

    def _give(self, text: str) -> str:
        self._held = self._held[len(text) :]
        self._given += len(text)
        return text
