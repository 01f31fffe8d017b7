"""Bases of the messages between driver and coordinator: pydantic models that are immutable and refuse unknown keys."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tailrace.deployments.messages.refusals import refusal

_HALF = re.compile("[\ud800-\udfff]")

MAX_NUMBER = 2**63 - 1
"""Maximum of seeds, steps, priorities and versions: SQLite, the wire and vLLM's seeds hold 64 bits."""


MAX_QUOTED = 80
"""Maximum number of characters of a name that a refusal repeats."""


def quoted(name: str) -> str:
    """Returns a name as refusals show it, in quotes and cut if it is long."""
    return repr(name) if len(name) <= MAX_QUOTED else f"{name[:MAX_QUOTED]!r}..."


def broken_text(text: str) -> str | None:
    """Returns in a few words why a text is not valid Unicode, or None: UTF-8 and tokenizers accept no half surrogate
    pair.
    """
    found = _HALF.search(text)
    return None if found is None else f"half of a surrogate pair at character {found.start()}; send whole characters"


def _whole(text: Any) -> Any:
    if isinstance(text, str) and (reason := broken_text(text)) is not None:
        raise ValueError(reason)
    return text


Text = Annotated[str, BeforeValidator(_whole)]
"""Text that can be encoded."""

Name = Annotated[str, Field(min_length=1), BeforeValidator(_whole)]
"""Text of one character or more."""


def first_line(kind: str, error: ValidationError) -> str:
    """Returns the first error of a message in one line, which names the field. `kind`: kind of the message."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = "".join(f".{part}" for part in first["loc"])
    return f"{kind}{place}: {first['msg'].removeprefix('Value error, ')}"


class Message(BaseModel):
    """Base of all messages: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestMessage(Message):
    """A message made by drivers. Raises ValueError with a substitute for fields of other servers, see `refusals`.

    None is "not given", for every field: trainers' dicts have a None for each value that they do not set.
    A message inside another one is checked again, since `model_copy` checks nothing.
    """

    model_config = ConfigDict(revalidate_instances="always")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        given = {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data
        if (reason := refusal(given, cls.model_fields)) is not None:
            raise ValueError(reason)
        return given
