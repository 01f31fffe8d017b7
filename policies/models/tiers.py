"""Number of workers of each ranking group, such that the groups' times rise in a line (RhymeRL 6.4, figure 12).

Invariant: the workers of a plan sum up to all of them; each group gets one or more, and no more than it has prompts
while another could use them. Pure; called by `HistoPipe` of the orderings and by `lab.research.histopipe`.
"""

from collections.abc import Callable, Sequence
from functools import cache

Time = Callable[[int], float]
"""Seconds of a ranking group by its number of workers; more workers take no longer."""

HALVINGS = 30
"""Number of halvings of the slope's interval, to a billionth of it; the paper stops at a second."""


def plan_tiers(times: Sequence[Time], prompts: Sequence[int], workers: int, train_s: float) -> list[int]:
    """Returns the workers of each group, shortest first: those of the flattest line, and the rest one by one to the
    group that would finish last. `prompts[i]`: maximum number of workers that group i can use. Raises ValueError for
    too few workers.
    """
    if workers < len(times):
        raise ValueError(f"{workers} workers cannot serve {len(times)} ranking groups")
    times = [cache(time_s) for time_s in times]
    counts = [min(count, most) for count, most in zip(flattest(times, workers, train_s), prompts, strict=True)]
    for _ in range(workers - sum(counts)):
        useful = [i for i, count in enumerate(counts) if count < prompts[i]] or range(len(counts))
        counts[max(useful, key=lambda i: (times[i](counts[i]), i))] += 1
    return counts


def flattest(times: Sequence[Time], workers: int, train_s: float) -> list[int]:
    """Returns the fewest workers with which group i finishes by t0 + i d, where t0 = max(times[0](k), train_s).

    The paper lets k be the greatest number a group may have: too few are left for the others unless training is slow.
    Here each k up to an equal share is tried, with the smallest d for it by binary search, and the line wins whose ends
    have the smallest sum: the two that a worker has one after the other. One always exists: at d = the greatest of
    (times[i](1) - t0) / i one worker suffices for each group but the first.
    """
    best = None
    for first in range(1, workers // len(times) + 1):
        start_s = max(times[0](first), train_s)
        slope_s, counts = _least_slope(times, workers, start_s)
        worth = (2 * start_s + slope_s * (len(times) - 1), first)
        if best is None or worth < best[0]:
            best = worth, counts
    return best[1]


def _least_slope(times: Sequence[Time], workers: int, start_s: float) -> tuple[float, list[int]]:
    low, high = 0.0, max([0.0, *((time_s(1) - start_s) / i for i, time_s in enumerate(times) if i)])
    high *= 1 + 1e-9  # a group's own line must let it in, whatever division and product round to
    if (flat := _needed(times, workers, start_s, 0.0)) is not None:
        return 0.0, flat
    counts = _needed(times, workers, start_s, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        plan = _needed(times, workers, start_s, middle)
        low, high, counts = (middle, high, counts) if plan is None else (low, middle, plan)
    return high, counts


def _needed(times: Sequence[Time], workers: int, start_s: float, slope_s: float) -> list[int] | None:
    """Returns the fewest workers of each group to stay below the line; None if they are more than available."""
    counts: list[int] = []
    for i, time_s in enumerate(times):
        most = workers - sum(counts) - (len(times) - i - 1)
        fits = next((k for k in range(1, most + 1) if time_s(k) <= start_s + i * slope_s), None)
        if fits is None:
            return None
        counts.append(fits)
    return counts
