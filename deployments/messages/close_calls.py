"""Close calls: how often floating-point noise can change a token, from the margins of draws.

Noise between two computations of the same logits moves the distance between two candidates by D. A token flips where
its margin is below -D. Margins near 0 are spread evenly, so their density there is enough to count flips.
Engines count margins by size; `tailrace verify` and the tests read the counts.
"""

from collections.abc import Mapping

import numpy as np

EDGES = tuple(float(f"{10 ** (half / 2):.2e}") for half in range(-12, -2))
"""Upper bounds of the classes of margins, in logits: two a decade, 1e-6 to 3.16e-2."""

DENSITY_BELOW = EDGES[-2]
"""Maximum margin that counts for the density at 0: over 1e-2, exp(-margin) changes by 1 %."""


def count_margins(margins: np.ndarray) -> dict[str, int]:
    """Returns the number of margins below each edge, by `margins_below.EDGE`, and the number of all, by `draws`.

    Forced tokens are draws too here: their margin is inf.
    """
    counts = np.searchsorted(np.sort(margins), EDGES)
    return {"draws": len(margins)} | {key_of(edge): int(count) for edge, count in zip(EDGES, counts, strict=True)}


def key_of(edge: float) -> str:
    return f"margins_below.{edge:g}"


def density(counts: Mapping[str, int]) -> float:
    """Returns the density of draws with a margin near 0, per logit of margin and per draw; 0 without draws."""
    return counts.get(key_of(DENSITY_BELOW), 0) / DENSITY_BELOW / max(1, counts.get("draws", 0))


def expected_flips_per_million(per_logit: float, noise: np.ndarray, redrawn_below: float = 0.0) -> float:
    """Returns the number of tokens per million draws that differ between two computations.

    per_logit: the `density`. noise f64[n]: sizes of the change of a distance between two candidates, in logits; either
    sign is as likely. redrawn_below: draws with a smaller margin never differ. Formula: the integral over margins m
    from there on of density times P(D < -m), which is density times the mean of max(0, |D| - redrawn_below) / 2.
    """
    if not len(noise):
        return 0.0
    return 1e6 * per_logit * float(np.maximum(np.abs(noise) - redrawn_below, 0.0).mean()) / 2
