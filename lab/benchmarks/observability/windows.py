"""The cost of a coordinator's observers, by windows with all of them and windows without. Pure arithmetic."""

from typing import NamedTuple

from tailrace.deployments.metrics.export import EXPORT_S

WINDOW_S = EXPORT_S + 0.2
"""Seconds of one window: the metrics are read once in it, and sent twice."""


class QuietWindow(NamedTuple):
    """Figures of one window: number of chunk ends, processor seconds of the loop's thread, and the seconds of these for
    each kind of observer.
    """

    ends: int
    loop_s: float
    counting_s: float
    reading_s: float
    tracing_s: float
    looking_s: float


def costs(without: list[QuietWindow], with_all: list[QuietWindow]) -> dict:
    """Returns the costs of the observers. `of_loop`: their time over the loop's other processor time, in windows with
    observers. `of_core`: their time over the wall time of these windows. Spans traced without observers do not count.
    """
    without = [one._replace(loop_s=one.loop_s - one.tracing_s) for one in without]
    off, on = _sums(without), _sums(with_all)
    kinds = {"metrics": on.counting_s + on.reading_s, "traces": on.tracing_s, "board": on.looking_s}
    kinds["all"] = sum(kinds.values())
    off_us, on_us = (_us_a_chunk(one) for one in (off, on))
    by_pair = [_us_a_chunk(b) / _us_a_chunk(a) - 1 for a, b in zip(without, with_all, strict=True)]
    return {
        "windows": len(without) + len(with_all),
        "chunk_ends": off.ends + on.ends,
        "loop_share": round(on.loop_s / (len(with_all) * WINDOW_S), 4),
        "of_core": {name: round(took_s / (len(with_all) * WINDOW_S), 5) for name, took_s in kinds.items()},
        "of_loop": {name: round(took_s / (on.loop_s - kinds["all"]), 5) for name, took_s in kinds.items()},
        "loop_us_a_chunk": {"off": round(off_us, 1), "on": round(on_us, 1)},
        "loop_cost_by_windows": round(on_us / off_us - 1, 4),
        "by_pair": [round(one, 3) for one in by_pair],
    }


def _us_a_chunk(window: QuietWindow) -> float:
    return 1e6 * window.loop_s / max(1, window.ends)


def _sums(windows: list[QuietWindow]) -> QuietWindow:
    return QuietWindow(*map(sum, zip(*windows, strict=True)))
