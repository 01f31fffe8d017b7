"""The grammar that odd requests are drawn from: every field of a request, with usual, edge and absurd values.

A request is a dict of plain JSON: `way`, one of WAYS; `message`, the fields of that way; and `late`, whether its mates
have tokens when it arrives. With `entry_alone` it is only checked, and does not reach the engine. Two ways are checked
as a driver's requests are; by `hand` a chunk is made without any check. Invariant: a seed gives the same request each
time.
"""

from random import Random
from typing import Any

from tailrace.lab.fuzz.engine.contradictions import CONTRADICTIONS
from tailrace.lab.fuzz.engine.fields import BATCH_FIELDS, CHUNK, GROUP, PROMPTS, SAMPLING, SESSION_FIELDS
from tailrace.lab.fuzz.engine.values import ABSURD, EDGE, KINDS, USUAL

WAYS = SESSION, BATCH, HAND = "session", "batch", "hand"
WAY_WEIGHTS = 4, 3, 4

ODD_COUNTS = (1, 2, 3), (6, 3, 1)
"""Numbers of odd fields of a request, and their weights: with many at once only the first would be refused."""

CONTRADICTION_SHARE, USUAL_FIELDS = 0.25, 3


def drawn(rng: Random) -> dict[str, Any]:
    """Returns a request with one to three odd fields, or fields that contradict each other, and some usual ones."""
    (way,) = rng.choices(WAYS, WAY_WEIGHTS)
    sampling: dict[str, Any] = {}
    message = _plain(way, sampling, rng)
    fields = _fields(way, message, sampling)
    for _ in range(rng.randrange(USUAL_FIELDS)):
        _set(rng.choice(fields), USUAL, rng)
    if rng.random() < CONTRADICTION_SHARE:
        sampling |= rng.choice(CONTRADICTIONS)
    else:
        (count,) = rng.choices(*ODD_COUNTS)
        for place in rng.sample(fields, count):
            _set(place, rng.choice((EDGE, ABSURD)), rng)
    return {"way": way, "late": rng.random() < 0.5, "message": message}


def _plain(way: str, sampling: dict, rng: Random) -> dict[str, Any]:
    """Returns the message of a usual request; `sampling` becomes part of it."""
    prompt, max_tokens = rng.choice(PROMPTS), rng.choice((4, 12))
    if way == HAND:
        return {"chunk_id": "odd", "token_ids": prompt, "max_tokens": max_tokens, "sampling": sampling}
    group = {"prompt_id": "odd", "token_ids": prompt, "samples": 1, "max_tokens": max_tokens, "sampling": sampling}
    return {"group": group} if way == SESSION else {"batch_id": "fuzz", "groups": [group]}


def _fields(way: str, message: dict, sampling: dict) -> list[tuple[dict, str, dict]]:
    """Returns each field as the dict that it is set in, its name and its values. Sampling has the largest part."""
    found = [(sampling, name, values) for name, values in SAMPLING.items()]
    if way == HAND:
        return found + [(message, name, values) for name, values in CHUNK.items()]
    group = message["group"] if way == SESSION else message["groups"][0]
    outer = SESSION_FIELDS if way == SESSION else BATCH_FIELDS
    found += [(group, name, values) for name, values in GROUP.items()]
    return found + [(message, name, values) for name, values in outer.items()]


def _set(place: tuple[dict, str, dict], kind: str, rng: Random) -> None:
    target, name, values = place
    given = values[kind] or values[KINDS[-1]]
    if name in ("text", "messages"):
        target.pop("token_ids", None)
    target[name] = rng.choice(given)
