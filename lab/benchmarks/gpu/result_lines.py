"""Results of `make gpu-check`: one JSON object a line, on the disk before the next measurement begins.

Invariant: a step that dies loses no measurement that had ended. A line has `at` (unix seconds) and `step`. A line with
`what` is a measurement: `s` (seconds) if it was timed, then figures, `error` or `skipped`. A line with `end` says how a
step ended. The first line of a run has neither, but the card and the settings of the run.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

NAME, LOG = "results.jsonl", "log.txt"


def foreign(folder: Path) -> str | None:
    """Returns the name of a file in a folder of results that no run of `make gpu-check` wrote, or None."""
    results = folder / NAME
    if not results.exists():
        return LOG if (folder / LOG).exists() else None
    with results.open(errors="replace") as file:
        first = next(_whole([file.readline()]), None)
    return None if isinstance(first, dict) and {"at", "step"} <= first.keys() else NAME


class ResultLines:
    """The file NAME of a folder. Several processes may append to the file."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME

    def add(self, step: str, **values) -> dict:
        """Appends a line, and returns it. Numbers and arrays of numpy and torch are written as JSON's, other values
        that JSON does not know as text; so are NaN and infinities, which strict parsers refuse.
        """
        line = {"at": round(time.time(), 1), "step": step} | values
        strict = json.loads(json.dumps(line, default=_plain), parse_constant=str)
        with self.path.open("a") as file:
            file.write(json.dumps(strict) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return line

    def size(self) -> int:
        """Returns the bytes of the file so far, for `since`."""
        return self.path.stat().st_size if self.path.exists() else 0

    def since(self, offset: int) -> list[dict]:
        """Returns the lines from byte `offset` on. A line that a killed process cut off is left out."""
        if not self.path.exists():
            return []
        return list(_whole(self.path.read_bytes()[offset:].decode(errors="replace").splitlines()))


def _plain(value):
    """Returns numbers and arrays of numpy and torch as Python's, and any other value as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _whole(lines: Iterable[str]):
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def figures(line: dict) -> str:
    """Returns the figures of a measurement as one line of text."""
    for key in ("error", "skipped"):
        if key in line:
            return f"{key}: {line[key]}"
    return ", ".join(
        f"{name} {short(value)}" for name, value in line.items() if name not in ("at", "step", "what", "s")
    )


def short(value) -> str:
    """Returns a value as text, its floats with four significant digits."""
    match value:
        case float():
            return f"{value:.4g}"
        case dict():
            return "{" + ", ".join(f"{key}: {short(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(short, value)) + "]"
    return str(value)


WIDTH = 150
"""Maximum characters of a line of the table; the file of results has whole lines."""


def table(lines: list[dict]) -> str:
    """Returns the lines as text, in their order: the measurements of a step, then how the step ended."""
    rows: list[str] = []
    for line in lines:
        if "what" in line:
            rows.append(f"  {line['what']}: {figures(line)}"[:WIDTH])
        elif "end" in line:
            rows.append(ending(line))
    return "\n".join(rows)


def ending(line: dict) -> str:
    """Returns how a step ended, as one line of text."""
    seconds = f", {line['s']:.0f} s" if "s" in line else ""
    reason = f" ({line['reason']})" if line.get("reason") else ""
    return f"{line['step']}: {line['end']}{seconds}{reason}"[:WIDTH]
