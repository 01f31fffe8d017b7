"""JSON from files that people and other tools write. Every fault is a ValueError of one line.

Python's parser alone lets RecursionError escape, takes the last of two equal keys, and passes on halves of surrogate
pairs, which no later step can encode.
"""

import json
from typing import Any

CONSTANTS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}
"""Not JSON, but written by many tools for rewards."""


def parse_json(text: str | bytes, constants: bool = False) -> Any:
    """Returns the value. `constants`: accept NaN and infinities."""
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text.removeprefix("\ufeff")
        value = json.loads(decoded, object_pairs_hook=_object, parse_constant=CONSTANTS.get if constants else _refused)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not usable: it is nested too deeply") from error
    if "\\ud" in decoded.lower():
        _check_text(value)
    return value


def parse_object(text: str | bytes, constants: bool = False) -> dict[str, Any]:
    """Returns the JSON object in the text."""
    value = parse_json(text, constants)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, not {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)}: the key is there twice; remove one")
    return found


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON; give a finite one")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a \\u escape is half of a surrogate pair; give both halves or the character") from error
