"""The text of a sample that is decoded once, on first use.

Invariant: the text and the stop reason are those that the coordinator would have made, and never change once made. A
result with a decoder is decoded before it is copied, compared, pickled or written as JSON, so these carry the text.
Called by the records of samples, which make such results, and by the client, which gives them a decoder.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, PrivateAttr, model_serializer

LATER = "text", "stop_reason"


class TextRule(NamedTuple):
    """How a text follows from tokens. `tokenizer`: names the content of its files. `stopped`: the last token ended it,
    by itself or as the end of one of the stop texts `stop`.
    """

    tokenizer: str
    stopped: bool
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


Decoder = Callable[[Sequence[int], TextRule], tuple[str, int | str | None]]
"""Returns text and stop reason of token ids."""


class LaterText(BaseModel):  # noqa: PLW1641 - pydantic makes the hash
    """Base of a message with `token_ids`, `text` and `stop_reason`; the last two may be decoded later."""

    _rule: TextRule | None = PrivateAttr(None)
    _decoder: Decoder | None = PrivateAttr(None)

    @classmethod
    def later(cls, rule: TextRule, **fields: Any):
        """Returns a message of these fields, which are not checked, without text and stop reason."""
        made = cls.model_construct(**fields)
        made.__dict__.pop("stop_reason", None)
        made._rule = rule
        return made

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer that its text needs; empty if it has the text."""
        return self._rule.tokenizer if self._rule is not None else ""

    def decode_by(self, decoder: Decoder) -> None:
        """Sets the decoder that decodes its text on first use."""
        self._decoder = decoder

    def settle(self) -> None:
        """Decodes its text now, if it has a decoder."""
        rule, decoder = self._rule, self._decoder  # another thread may settle it meanwhile
        if rule is not None and decoder is not None:
            found = self.__dict__ | dict(zip(LATER, decoder(self.token_ids, rule), strict=True))
            in_order = {name: found[name] for name in type(self).model_fields}
            object.__setattr__(self, "__dict__", in_order)
            self.__pydantic_fields_set__.update(LATER)
            self._rule = self._decoder = None

    def __getattr__(self, name: str) -> Any:
        if name in LATER:
            self.settle()
            if name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(f"{name}: not decoded yet; results of a RolloutClient decode it when asked for")
        return super().__getattr__(name)

    @model_serializer(mode="wrap")
    def _whole(self, write: Any) -> Any:
        self.settle()
        return write(self)

    def __getstate__(self) -> dict:
        self.settle()
        return super().__getstate__()

    def __copy__(self):
        self.settle()
        return super().__copy__()

    def __deepcopy__(self, memo: dict | None = None):
        self.settle()
        return super().__deepcopy__(memo)

    def __iter__(self):
        self.settle()
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        for one in (self, other):
            if isinstance(one, LaterText):
                one.settle()
        return super().__eq__(other)
