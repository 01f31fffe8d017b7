"""JSON bodies of requests, parsed strictly: one check for all routes.

Invariant: all that a route gets can be written again, as JSON in UTF-8. Python's parser alone accepts infinities, the
last of two equal keys and halves of surrogate pairs, and lets RecursionError escape.
"""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute

from tailrace.deployments.messages.message import broken_text

MAX_DEPTH = 128
"""Maximum nesting of objects and lists. vLLM accepts 64 levels of a schema; templates and parsers recurse about
1,000.
"""

LARGE_BYTES = 1 << 18
"""Size of a body from which on it is parsed on a thread: one of 10 MB in lists took the event loop 10 s."""

MAX_PATH = 100
"""Maximum characters of the path of an object or list, and of a key in it: the check of a body copies both for each
part.
"""


def parsed(body: bytes) -> Any:
    """Returns the value. Raises ValueError, one line that names the field, for all that is not JSON in Unicode."""
    suspect = False

    def number(text: str) -> float:
        nonlocal suspect
        value = float(text)
        suspect = suspect or not math.isfinite(value)
        return value

    try:
        text = body.decode(json.detect_encoding(body))
        value = json.loads(text, parse_float=number, parse_constant=number, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        if not str(error).startswith("Exceeds the limit"):  # Python's, of digits
            raise
        raise ValueError("the body has a number of thousands of digits; give a smaller one") from error
    if (suspect or "\\ud" in text.lower() or text.count("[") + text.count("{") > MAX_DEPTH) and (
        fault := fault_of(value)
    ) is not None:
        raise ValueError(fault)
    return value


def fault_of(value: Any) -> str | None:
    """Returns one line about a part of a value that cannot be written as JSON in UTF-8, or is nested too deeply; or
    None.
    """
    opened = [("", _parts(value))]
    while opened:
        path, parts = opened[-1]
        for name, part in parts:
            place = f"{path}.{name[:MAX_PATH]}" if path else name[:MAX_PATH]
            if broken_text(name):
                return f"{place}: a key has half of a surrogate pair, which is no text"
            if isinstance(part, str) and broken_text(part):
                return f"{place}: half of a surrogate pair is no text"
            if isinstance(part, float) and not math.isfinite(part):
                return f"{place}: {part} is not a finite number"
            if isinstance(part, dict | list):
                if len(opened) == MAX_DEPTH:
                    return f"{place}: nested deeper than {MAX_DEPTH} levels"
                opened.append((place[:MAX_PATH], _parts(part)))
                break
        else:
            opened.pop()
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        return iter(value.items())
    if isinstance(value, list):
        return ((str(place), part) for place, part in enumerate(value))
    return iter((("body", value),))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice[:MAX_PATH]}: the key is given twice; give it once")
    return found


class StrictRequest(Request):
    """A request whose body is read by `parsed`."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                body = await self.body()
                self._json = parsed(body) if len(body) < LARGE_BYTES else await asyncio.to_thread(parsed, body)
            except ValueError as error:
                raise HTTPException(400, str(error)) from error  # FastAPI passes on no other
        return self._json


class StrictRoute(APIRoute):
    """A route of strict requests."""

    def get_route_handler(self) -> Callable:
        handler = super().get_route_handler()

        async def strict(request: Request):
            return await handler(StrictRequest(request.scope, request.receive))

        return strict
