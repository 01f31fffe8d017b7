"""Search for the smallest requests that still show a problem: first the fewest requests, then the fewest fields."""

from collections.abc import Callable, Iterator
from copy import deepcopy

Shows = Callable[[list[dict]], bool]

NEEDED = {
    "way",
    "late",
    "entry_alone",
    "message",
    "group",
    "groups",
    "batch_id",
    "prompt_id",
    "samples",
    "chunk_id",
    "token_ids",
}
"""Keys that stay: without them a request is another one."""


def shortened(requests: list[dict], shows: Shows, most_tries: int) -> list[dict]:
    """Returns a part of the requests that still `shows` the problem, after at most `most_tries` tries.

    Halves are tried first, since one culprit is the usual case. Returns all requests if no part shows the problem.
    """
    tries = iter(range(most_tries))
    requests = _fewer(requests, shows, tries)
    for place in range(len(requests)):
        requests = _plainer(requests, place, shows, tries)
    return requests


def _fewer(requests: list[dict], shows: Shows, tries: Iterator[int]) -> list[dict]:
    size = len(requests) // 2
    while size >= 1:
        for start in range(0, len(requests), size):
            part = requests[start : start + size]
            if len(part) < len(requests) and next(tries, None) is not None and shows(part):
                return _fewer(part, shows, tries)
        for start in range(0, len(requests), size) if len(requests) > 2 else ():
            rest = requests[:start] + requests[start + size :]
            if rest and next(tries, None) is not None and shows(rest):
                return _fewer(rest, shows, tries)
        size //= 2
    return requests


def _plainer(requests: list[dict], place: int, shows: Shows, tries: Iterator[int]) -> list[dict]:
    for path in _paths(requests[place]):
        candidate = deepcopy(requests)
        _drop(candidate[place], path)
        if next(tries, None) is None:
            return requests
        if shows(candidate):
            requests = candidate
    return requests


def _paths(value: object, path: tuple = ()) -> list[tuple]:
    """Returns the places of all fields that may be left out, outer ones first."""
    found: list[tuple] = []
    items = value.items() if isinstance(value, dict) else ()
    for name, inner in items:
        if name not in NEEDED:
            found.append((*path, name))
        if name in ("message", "group", "sampling"):
            found += _paths(inner, (*path, name))
        if name == "groups":
            found += _paths(inner[0], (*path, name, 0))
    return [place for place in found if place[-1] != "sampling" or len(place) < 3]


def _drop(request: dict, path: tuple) -> None:
    """Removes the field at `path`, if it is still there."""
    for name in path[:-1]:
        if isinstance(request, dict) and name not in request:
            return
        request = request[name]
    if isinstance(request, dict):
        request.pop(path[-1], None)
