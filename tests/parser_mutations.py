"""Structured mutations of what the parsers read: values of another kind, keys dropped or doubled, bytes damaged."""

import copy
import json
from collections.abc import Iterator
from random import Random

STRANGE = (
    None, True, False, 0, -1, 1.5, 10**20, -(10**20), 10**400, 1e308, float("nan"), float("inf"), "", "x", "\u0000",
    "\u2028", "\ud800", "../../x", "\x1b[31m", "9" * 5000, [], {}, [[]], {"": None}, [None] * 3, "x" * 10_000,
)  # fmt: skip
"""Values for the place of any other."""

PIECES = (
    b"[" * 100_000, b"1" * 5000, b"\xff\xfe\x00", b"\n", b"\n\n", b"{}", b"null", b"NaN", b'"\\ud800"', b"\x00", b"-",
)  # fmt: skip
"""Bytes to insert anywhere."""


def mutated_value(value: object, rng: Random) -> object:
    """A copy with one to three changes, each at a random place."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([(), *paths_of(value)])
        if not path:
            continue
        parent = value
        for key in path[:-1]:
            parent = copy.deepcopy(parent[key])
        _change(parent, path[-1], rng)
    return value


def paths_of(value: object, above: tuple = ()) -> Iterator[tuple]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*above, key)
        yield from paths_of(child, (*above, key))


def _change(parent: dict | list, key: object, rng: Random) -> None:
    match rng.randrange(4):
        case 0 if isinstance(parent, dict):
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice(("unknown", "", str(key) + "s", str(key).upper()))] = copy.deepcopy(parent[key])
        case 2 if isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        case _:
            parent[key] = copy.deepcopy(rng.choice(STRANGE))


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """Damage that no value can have: cut, flipped, doubled, nested, not UTF-8, a byte order mark."""
    at = rng.randrange(len(data) + 1)
    before, after = data[:at], data[at:]
    whole = (before, b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r\n"), before + data[at // 2 :])
    flipped = before + bytes([rng.randrange(256)]) + after[1:]
    return rng.choice((*whole, flipped, *(before + piece + after for piece in PIECES)))


def json_lines(values: list, rng: Random) -> bytes:
    """The values as JSON lines, mutated either as values or as bytes."""
    if rng.random() < 0.5:
        place = rng.randrange(len(values))
        values = [mutated_value(value, rng) if i == place else value for i, value in enumerate(values)]
        return _dumped(values)
    return mutated_bytes(_dumped(values), rng)


def _dumped(values: list) -> bytes:
    """Python's own limit of digits would stop the writer, not the reader."""
    return b"".join(json.dumps(value).encode("utf-8", "surrogatepass") + b"\n" for value in values)
