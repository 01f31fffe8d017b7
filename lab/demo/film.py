"""A recorded demo played in the terminal: both runs side by side, faster than in reality.

A terminal shows two bars; other outputs get LINES lines. All output goes to stderr. Called by `tailrace demo --replay`.
"""

import time
from bisect import bisect_right
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tailrace.lab.demo.outcome import NAMES, DemoOutcome

PLAY_S = 20.0
"""Seconds that the longer run takes to play."""

FRAMES_PER_S = 10.0
LINES = 8
"""Number of lines that are printed without a terminal."""


def play(outcome: DemoOutcome, seconds: float = PLAY_S) -> None:
    """Plays both runs, and returns when both have ended. The longer one takes `seconds`."""
    ends = {name: sorted(one.ended_s for one in of_run.run.ended) for name, of_run in outcome.records.items()}
    whole_s = max(each[-1] for each in ends.values())
    console = Console(stderr=True)
    if console.is_terminal:
        _bars(console, ends, whole_s, seconds)
    else:
        for number in range(1, LINES + 1):
            time.sleep(seconds / LINES)
            at_s = whole_s * number / LINES
            console.print(f"{at_s:6.1f} s: {_line(ends, at_s)}", highlight=False)


def ended(ends_s: list[float], at_s: float) -> int:
    """Returns the number of samples that have ended by `at_s`, from their sorted ends in seconds."""
    return bisect_right(ends_s, at_s)


def _line(ends: Mapping[str, list[float]], at_s: float) -> str:
    return ", ".join(f"{NAMES[name]} {ended(each, at_s)}/{len(each)}" for name, each in ends.items())


def _bars(console: Console, ends: Mapping[str, list[float]], whole_s: float, seconds: float) -> None:
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[at]}"))
    frames = max(1, round(seconds * FRAMES_PER_S))
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(NAMES[name], total=len(each), at="") for name, each in ends.items()}
        for frame in range(1, frames + 1):
            time.sleep(seconds / frames)
            at_s = whole_s * frame / frames
            for name, each in ends.items():
                progress.update(tasks[name], completed=ended(each, at_s), at=f"{min(at_s, each[-1]):.0f} s")
