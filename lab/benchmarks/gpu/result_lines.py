"""Results of `gpu check`: one JSON object a line, on the disk before the next measurement begins.

Invariant: a step that dies loses no measurement that had ended. A line has `at` (unix seconds) and `step`. With
`what` it is a measurement: `s` seconds, then its figures, or `error` or `skipped`. Without, it is the end of a step.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

NAME, LOG = "results.jsonl", "log.txt"


def foreign(folder: Path) -> str | None:
    """Returns the name of a file of others in a folder of results, or None. Results of earlier runs are appended to."""
    results = folder / NAME
    if not results.exists():
        return LOG if (folder / LOG).exists() else None
    with results.open(errors="replace") as file:
        first = next(_whole([file.readline()]), None)
    return None if isinstance(first, dict) and {"at", "step"} <= first.keys() else NAME


class ResultLines:
    """The file NAME of a folder, which may be appended to by several processes."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME

    def add(self, step: str, **values) -> dict:
        """Appends a line; values that are not JSON are written as text."""
        line = {"at": round(time.time(), 1), "step": step} | values
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=_plain) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return line

    def size(self) -> int:
        """Bytes so far; see `since`."""
        return self.path.stat().st_size if self.path.exists() else 0

    def since(self, offset: int) -> list[dict]:
        """Returns the lines from this byte on. One that a killed process cut off is left out."""
        if not self.path.exists():
            return []
        return list(_whole(self.path.read_bytes()[offset:].decode(errors="replace").splitlines()))


def _plain(value):
    """Numbers and arrays of numpy and torch become Python's, everything else its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _whole(lines: Iterable[str]):
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def figures(line: dict) -> str:
    """The figures of a measurement, in one line."""
    for key in ("error", "skipped"):
        if key in line:
            return f"{key}: {line[key]}"
    return ", ".join(
        f"{name} {short(value)}" for name, value in line.items() if name not in ("at", "step", "what", "s")
    )


def short(value) -> str:
    """A value without the digits that say nothing."""
    match value:
        case float():
            return f"{value:.4g}"
        case dict():
            return "{" + ", ".join(f"{key}: {short(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(short, value)) + "]"
    return str(value)


WIDTH = 150
"""Columns of the table; the file has all of it."""


def table(lines: list[dict]) -> str:
    """Steps in their order, each with its measurements below it."""
    rows: list[str] = []
    for line in lines:
        if "what" in line:
            rows.append(f"  {line['what']}: {figures(line)}"[:WIDTH])
        elif "end" in line:
            rows.append(ending(line))
    return "\n".join(rows)


def ending(line: dict) -> str:
    """How a step ended, in one line."""
    seconds = f", {line['s']:.0f} s" if "s" in line else ""
    reason = f" ({line['reason']})" if line.get("reason") else ""
    return f"{line['step']}: {line['end']}{seconds}{reason}"[:WIDTH]
