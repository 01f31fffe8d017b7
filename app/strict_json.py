"""JSON from files that people and other tools write. Every fault is a ValueError of one line.

Python's parser alone lets RecursionError escape, accepts the last of two equal keys, reads 1e400 as infinity, and
passes on halves of surrogate pairs, which no later step can encode.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from tailrace.deployments.messages.message import broken_text

CONSTANTS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}
"""Constants that are not JSON, but that many tools write for rewards."""

WIDE = "it looks like UTF-16; save it as UTF-8"


def parse_json(text: str | bytes, constants: bool = False) -> Any:
    """Returns the value. `constants`: accept NaN and infinities."""
    hooks = {} if constants else {"parse_constant": _refused, "parse_float": _finite}
    try:
        decoded = decoded_text(text) if isinstance(text, bytes) else text.removeprefix("\ufeff")
        value = json.loads(decoded, object_pairs_hook=_object, parse_int=_integer, **hooks)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not usable: it is nested too deeply") from error
    if "\\ud" in decoded.lower() and (key := key_of_broken_text(value)) is not None:
        where = f"{key}: " if key else ""
        raise ValueError(f"{where}a \\u escape is half of a surrogate pair; give both halves or the character")
    return value


def parse_object(text: str | bytes, constants: bool = False) -> dict[str, Any]:
    """Returns the JSON object in the text."""
    value = parse_json(text, constants)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, not {type(value).__name__}")
    return value


def decoded_text(data: bytes) -> str:
    """Returns UTF-8 as text, without its byte order mark. Raises ValueError that names the byte."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        raise ValueError(f"not UTF-8 at byte {error.start + 1}{f': {WIDE}' if wide else ''}") from error


def key_of_broken_text(value: Any) -> str | None:
    """Returns the dotted key of the first text that is not valid Unicode (empty: the value itself), or None."""
    return next((key for key, text in _texts("", value) if broken_text(text)), None)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the texts in a value, with their dotted keys; a key is a text too."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            if isinstance(name, str):
                yield key, name
            yield from _texts(f"{key}.{name}".lstrip("."), part)
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from _texts(f"{key}.{place}".lstrip("."), part)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)}: the key is there twice; remove one")
    return found


def _integer(digits: str) -> int:
    return bounded(int, digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is beyond the numbers of a computer; give a finite one")
    return value


def bounded(read: Callable[[str], int], digits: str) -> int:
    """Returns the integer that `read` makes of digits. Raises ValueError if there are thousands of them."""
    try:
        return read(digits)
    except ValueError as error:
        raise ValueError(f"{digits[:20]}...: a number of {len(digits)} digits; give a smaller one") from error


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON; give a finite one")
