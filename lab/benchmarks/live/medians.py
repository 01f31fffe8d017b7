"""One set of figures for a run that was repeated, since machines are noisy. Called by benchmarks that repeat runs."""

from collections.abc import Mapping, Sequence
from statistics import median


def middle(repeats: Sequence[Mapping]) -> dict:
    """Returns the median of each figure, or None if no run has it, and all makespans, tails and drains in order."""
    known = {key: [one[key] for one in repeats if one[key] is not None] for key in repeats[0]}
    medians = {key: median(values) if values else None for key, values in known.items()}
    kept = [key for key in ("makespan_s", "tail_s", "drain_s") if key in medians]
    return medians | {f"all_{key}": [one[key] for one in repeats] for key in kept}
