"""Records of each drawn token besides its id: logprobs, its margin, and whether it was drafted.

Invariant: entries are addressed by (request, absolute position) and the last write wins.
A row that vLLM samples, discards (partial prefill) and samples again therefore leaves no trace.
`sampler.py` writes. The engine replica takes each request's entries exactly once, after vLLM has dropped it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tailrace.deployments.messages.rollout import Mask, Top

FIELDS = {
    "logprobs": np.float32,
    "raw_logprobs": np.float32,
    "margins": np.float32,
    "drafted": np.int16,
    "accepted": np.int16,
}
MORE = "tops", "masks"
"""Extra records of a position, for requests that need them."""

BLANKS = {"logprobs": np.nan, "raw_logprobs": np.nan, "margins": np.inf, "drafted": 0, "accepted": 0}


class DrawRecord(NamedTuple):
    """Record of a request's tokens in order: logprobs and margins f32[count], see `sample_rows`; counts of draft
    tokens.

    `tops`, `masks`: one entry for each token's position, if requested, see `top_logprobs` and `kept_tokens`.
    """

    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    margins: np.ndarray
    drafted: int
    accepted: int
    tops: tuple[Top, ...] = ()
    masks: tuple[Mask, ...] = ()

    @classmethod
    def none(cls) -> "DrawRecord":
        return cls(*np.empty((3, 0), np.float32), drafted=0, accepted=0)

    def then(self, other: "DrawRecord") -> "DrawRecord":
        """Returns the record of these tokens followed by the other ones."""
        arrays = (np.concatenate(pair) for pair in zip(self[:3], other[:3], strict=True))
        counts = self.drafted + other.drafted, self.accepted + other.accepted
        return DrawRecord(*arrays, *counts, tops=self.tops + other.tops, masks=self.masks + other.masks)

    def redrawn(self, place: int, other: "DrawRecord") -> "DrawRecord":
        """Returns this record with the token at `place` taken from `other`; its margin and the counts stay."""
        self.logprobs[place : place + 1] = other.logprobs
        self.raw_logprobs[place : place + 1] = other.raw_logprobs
        more = {name: (getattr(self, name), getattr(other, name)) for name in MORE}
        return self._replace(
            **{name: (*mine[:place], *new, *mine[place + 1 :]) for name, (mine, new) in more.items() if new}
        )


class LogprobStore:
    """One row of arrays per open request, from the first position drawn for it; rows are reused."""

    def __init__(self, requests: int = 8, tokens: int = 256):
        self._slot_of: dict[str, int] = {}
        self._free = list(range(requests))
        self._first, self._taken = np.zeros((2, requests), np.int64)
        self._fields = {name: np.zeros((requests, tokens), kind) for name, kind in FIELDS.items()}
        self._more: dict[str, dict[int, dict[int, tuple]]] = {name: {} for name in MORE}  # each by slot and position

    def __len__(self) -> int:
        return len(self._slot_of)

    def slots(self, req_ids: list[str], positions: np.ndarray) -> np.ndarray:
        """Returns i64[n]: the row of each request's entries. Opens rows for new requests at their positions i64[n]."""
        for req_id, position in zip(req_ids, positions, strict=True):
            if req_id not in self._slot_of:
                self._open(req_id, int(position))
        return np.array([self._slot_of[req_id] for req_id in req_ids], np.int64)

    def opened_at(self, slots: np.ndarray) -> np.ndarray:
        """Returns i64[n]: the first position of the requests in these rows."""
        return self._first[slots]

    def taken(self, slots: np.ndarray) -> np.ndarray:
        """Returns i64[n]: how many requests have left these rows. A row whose number has grown is another request's."""
        return self._taken[slots]

    def write(self, slots, positions, logprobs, raw_logprobs, margins, drafted=0, accepted=0):
        """Writes one entry per (slot, position), all i64[m]; the values are arrays [m] or one number.

        drafted: draft tokens verified in the step that begins at this position. accepted: 1 if this token was drafted.
        Raises ValueError for a position before the request's first one.
        """
        places = positions - self._first[slots]
        if not places.size:
            return
        if places.min() < 0:
            raise ValueError("a token was drawn before the first position of its request")
        self._reserve(int(places.max()) + 1)
        for name, values in zip(FIELDS, (logprobs, raw_logprobs, margins, drafted, accepted), strict=True):
            self._fields[name][slots, places] = values

    def write_more(self, slots, positions, rows, more: Mapping[str, Mapping[int, tuple]]) -> None:
        """Records extras of (slot, position) entries, all i64[m]; `more` has them by their name in MORE, then by
        row.
        """
        for name, by_row in more.items():
            for slot, position, row in zip(slots, positions, rows, strict=True):
                if row in by_row:
                    self._more[name].setdefault(int(slot), {})[int(position)] = by_row[row]

    def take(self, req_id: str, start: int, count: int) -> DrawRecord:
        """Returns the record of `count` tokens from position `start`.

        Drops the request. vLLM may cut tokens after a stop token; they and their drafts are not counted.
        Logprobs of positions never drawn are NaN. A request never sampled has no entries: KeyError unless count is 0.
        """
        if req_id not in self._slot_of and count == 0:
            return DrawRecord.none()
        slot = self._slot_of[req_id]
        begin = start - int(self._first[slot])
        if count and begin < 0:
            raise ValueError(f"{req_id}: position {start} is before the first one drawn, {self._first[slot]}")
        self._free.append(self._slot_of.pop(req_id))
        self._taken[slot] += 1
        more = {name: self._more[name].pop(slot, {}) for name in MORE}
        begin = max(begin, 0)
        self._reserve(begin + count)
        taken = {name: field[slot, begin : begin + count] for name, field in self._fields.items()}
        arrays = (taken[name].copy() for name in ("logprobs", "raw_logprobs", "margins"))
        counts = int(taken["drafted"].sum()), int(taken["accepted"].sum())
        places = range(start, start + count)
        more = {name: tuple(found.get(at, ()) for at in places) if found else () for name, found in more.items()}
        return DrawRecord(*arrays, *counts, **more)

    def _open(self, req_id, position):
        if not self._free:
            rows = len(self._first)
            self._free = list(range(rows, 2 * rows))
            self._first, self._taken = (
                np.concatenate([each, np.zeros(rows, np.int64)]) for each in (self._first, self._taken)
            )
            self._fields = {name: np.concatenate([a, np.zeros_like(a)]) for name, a in self._fields.items()}
        slot = self._slot_of[req_id] = self._free.pop()
        self._first[slot] = position
        for name, field in self._fields.items():
            field[slot] = BLANKS[name]

    def _reserve(self, tokens):
        width = self._fields["drafted"].shape[1]
        if tokens <= width:
            return
        more = max(width, tokens - width)
        for name, field in self._fields.items():
            added = np.full((len(field), more), BLANKS[name], field.dtype)
            self._fields[name] = np.concatenate([field, added], axis=1)
