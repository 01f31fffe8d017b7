"""How likely draft tokens are to be right, by how much of the group and of earlier epochs the drafter has seen.

A draft token is right with the same chance given that those before it are, so w drafts make 1 + p + ... + p^w tokens a
verification on average; this relation turns measured tokens per verification into chances. An answer of an earlier
epoch counts as `answer_share` of a group mate, and the two add up: on the trace one smooth curve then passes through
all measurements, of mates, of history and of both. Invariant: more evidence is never worse, and nothing is claimed
beyond the measurements. Called by the simulator's speculation (`chance`), its races (`ModelledMethod`) and its lower
bounds.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from tailrace.lab.simulator.types import WorkloadGroup

HISTORY_SHARE = 0.8
"""A past answer as a share of a mate's. On the trace 8 and 16 of them equal 6.8 and 12.7 mates, and 16 with
7 mates equal 19 mates if the curve continued: 0.85, 0.79 and 0.74 each."""


class Measured(NamedTuple):
    """Tokens per verification, bonus included, from this many other samples of the group and past answers."""

    mates: float
    answers: float
    tokens: float


class Chances(Protocol):
    """The interface to the simulator: the chance that the next draft token of sample `index` is right, given that those
    before it are.

    The sample has `generated` tokens, `mates` other samples of its group have some too, and `epochs` earlier epochs are
    known.
    """

    def chance(self, group: WorkloadGroup, index: int, generated: int, mates: int, epochs: int) -> float: ...


@dataclass(frozen=True)
class AcceptanceTable:
    """Chances from a measured table at `drafts` drafts.

    Between measurements the log odds are linear in log2(1 + evidence). Raises ValueError for an empty table, tokens
    that no chance gives (outside 1 to 1 + drafts), or tokens that fall as the evidence grows.
    """

    table: tuple[Measured, ...]
    drafts: int = 8
    answer_share: float = HISTORY_SHARE
    _at: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _odds: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        rows = sorted((self.evidence(row.mates, row.answers), row.tokens) for row in self.table)
        if not rows or any(a[1] > b[1] for a, b in pairwise(rows)):
            raise ValueError(f"an acceptance table has a row or more, and its tokens grow with the evidence: {rows}")
        object.__setattr__(self, "_at", tuple(math.log2(1 + evidence) for evidence, _ in rows))
        object.__setattr__(self, "_odds", tuple(_log_odds(chance_for(tokens, self.drafts)) for _, tokens in rows))

    def evidence(self, mates: float, answers: float) -> float:
        """Returns the evidence as a number of group mates."""
        return mates + self.answer_share * answers

    def mean_chance(self, evidence: float, factor: float = 1.0) -> float:
        """Returns the chance at this evidence in mates, with the odds times `factor`; constant beyond the table."""
        at, odds = self._at, self._odds
        x = math.log2(1 + evidence)
        n = bisect_right(at, x)
        if 0 < n < len(at):
            value = odds[n - 1] + (odds[n] - odds[n - 1]) * (x - at[n - 1]) / (at[n] - at[n - 1])
        else:
            value = odds[min(n, len(at) - 1)]
        return 1 / (1 + math.exp(-value) / factor)

    def chance(self, group: WorkloadGroup, index: int, generated: int, mates: int, epochs: int) -> float:
        """See Chances. The sample's own tokens do not count: the table's figures are means over whole samples."""
        answers = sum(len(lengths) for lengths in group.past_lengths[:epochs])
        return self.mean_chance(self.evidence(mates, answers), group.predictability)


@dataclass(frozen=True)
class ModelledMethod:
    """A way to draft (SpecActor 4.2): its acceptance, and the cost of a draft token: base_s + token_s * batch.

    Indexes cost next to nothing; a draft model's D(b) = b D' + a has a = base_s, D' = token_s, in seconds.
    """

    name: str
    acceptance: Chances
    base_s: float = 0.0
    token_s: float = 0.0

    def draft_s(self, batch: float) -> float:
        """Returns the seconds for one draft token of each of `batch` samples."""
        return self.base_s + self.token_s * batch


@dataclass(frozen=True)
class BestOf:
    """Fastest-of-N as a chance: that of the best of several methods. Used for bounds, where drafting is free."""

    methods: Sequence[ModelledMethod]

    def chance(self, group: WorkloadGroup, index: int, generated: int, mates: int, epochs: int) -> float:
        return max(m.acceptance.chance(group, index, generated, mates, epochs) for m in self.methods)


def expected_tokens(chance: float, drafts: int) -> float:
    """Returns the tokens that a verification makes on average with `drafts` drafts: 1 + p + ... + p^w."""
    return float(drafts + 1) if chance >= 1 else (1 - chance ** (drafts + 1)) / (1 - chance)


def chance_for(tokens: float, drafts: int) -> float:
    """Returns the inverse of `expected_tokens`, by bisection. Raises ValueError outside 1 to 1 + drafts."""
    if not 1 < tokens < 1 + drafts:
        raise ValueError(f"no chance makes {tokens} tokens of {drafts} drafts and one more")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, drafts) < tokens else (low, middle)
    return (low + high) / 2


def aimd_share(chance: float, start: int = 2, step: int = 2, most: int = 32) -> float:
    """Returns the share of right drafts under RhymeRL's window (5.4: all right, `step` more; else back to `start`).

    The windows form a chain: from w to w + step with p^w, else to `start`; means are over its stationary law.
    """
    share, right, made, window = 1.0, 0.0, 0.0, start
    while window < most:
        right += share * (expected_tokens(chance, window) - 1)
        made += share * window
        share *= chance**window
        window = min(window + step, most)
    share /= 1 - chance**window  # at the greatest window it stays until a rejection
    return (right + share * (expected_tokens(chance, window) - 1)) / (made + share * window)


def _log_odds(chance: float) -> float:
    return math.log(chance / (1 - chance))
