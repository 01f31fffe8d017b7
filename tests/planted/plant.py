"""Plants each defect in a copy of the repository, alone, and runs the checks that are to find it.

    PYTHONPATH=tests python -m planted.plant [--room FOLDER] [--name TEXT] [--jobs N] [--json]

First the checks run without a defect, and must pass. A defect is found if a test fails; it survives if all pass. Exit
code 0: each one is found; 1: one survives, or a check is broken; 2: bad input.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from planted.defect import ROOT, Defect, defects

LIMIT_S = 600.0
"""Seconds for the checks of one defect: one that makes them hang is found."""

CACHES = ("*.nbi", "*.nbc")
"""Compiled kernels beside their files; a copy that keeps their times need not compile again."""


class Outcome(NamedTuple):
    """`state`: found, survived or broken; `by`: the first test that failed, or the reason why the check is broken."""

    name: str
    room: str
    state: str
    by: str
    seconds: float


def copied(folder: Path) -> Path:
    """Copy all files that git knows or would add, and compiled kernels. Returns the copy's root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [Path(name) for name in listed.stdout.split("\0") if name]
    rooms = {name.parent for name in names if name.suffix == ".py"}
    names += [path.relative_to(ROOT) for room in rooms for form in CACHES for path in (ROOT / room).glob(f"*/{form}")]
    for name in names:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def checked(copy: Path, checks: Iterable[str], more: tuple[str, ...] = ("-x",)) -> tuple[str, str]:
    """Run tests in a copy. Returns the state and the first test that failed, or the end of the output."""
    options = ("-q", "-p", "no:cacheprovider", "--hypothesis-profile", "unshrunk", *more)
    command = [sys.executable, "-m", "pytest", *options, *checks]
    variables = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "found", f"no end after {LIMIT_S:.0f} s"
    if done.returncode == 0:
        return "survived", ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return "found", failed[1]
    return "broken", (done.stdout + done.stderr).strip()[-400:]


def tried(defect: Defect, copies: "SimpleQueue[Path]") -> Outcome:
    """Plant one defect in a free copy, check, and take it out again."""
    copy, started = copies.get(), time.monotonic()
    file = copy / defect.file
    text = file.read_text()
    try:
        file.write_text(defect.planted(text))
        state, by = checked(copy, defect.found_by)
    finally:
        file.write_text(text)
        copies.put(copy)
    return Outcome(defect.name, defect.room, state, by, round(time.monotonic() - started, 1))


def chosen(room: str, name: str) -> list[Defect]:
    """Raises SystemExit if none is chosen."""
    found = [one for one in defects() if one.room.startswith(room) and name in one.name]
    if not found:
        print(f"--room {room!r} --name {name!r}: no such defect; see tests/planted/defects", file=sys.stderr)
        raise SystemExit(2)
    return found


def tiers(checks: set[str]) -> list[list[str]]:
    """Pure checks and live ones: side by side they cannot share a process."""
    live = {check for check in checks if check.startswith("tests/live")}
    return [sorted(part) for part in (checks - live, live) if part]


def campaign(wanted: list[Defect], jobs: int, note) -> list[Outcome]:
    """Outcomes in the order of `wanted`. `note`: called with each as it comes. Raises SystemExit if a check fails
    without a defect."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copies.put(copied(Path(folder) / str(number)))
        first = copies.get()
        for checks in tiers({check for one in wanted for check in one.found_by}):
            state, by = checked(first, checks, ("-n", str(jobs), "--dist", "loadfile"))
            if state != "survived":
                print(f"without a defect a check is {state}: {by}", file=sys.stderr)
                raise SystemExit(1)
        copies.put(first)
        outcomes = []
        with ThreadPoolExecutor(jobs) as pool:
            for outcome in pool.map(lambda one: tried(one, copies), wanted):
                note(outcome)
                outcomes.append(outcome)
    return outcomes


def shown(outcome: Outcome) -> str:
    return f"{outcome.state:9} {outcome.seconds:6.1f} s  {outcome.name}  {outcome.by}"


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--room", default="", help="defects of files below this folder alone")
    given.add_argument("--name", default="", help="defects with this text in their names alone")
    given.add_argument("--jobs", type=int, default=2, help="defects at a time, each in a copy of its own")
    given.add_argument("--json", action="store_true", help="print one JSON document at the end")
    asked = given.parse_args()
    wanted = chosen(asked.room, asked.name)
    outcomes = campaign(wanted, asked.jobs, lambda one: print(shown(one), file=sys.stderr, flush=True))
    counts = {state: sum(one.state == state for one in outcomes) for state in ("found", "survived", "broken")}
    if asked.json:
        print(json.dumps({"counts": counts, "defects": [one._asdict() for one in outcomes]}, indent=1))
    else:
        print(", ".join(f"{count} {state}" for state, count in counts.items()))
    raise SystemExit(0 if counts["found"] == len(outcomes) else 1)


if __name__ == "__main__":
    main()
