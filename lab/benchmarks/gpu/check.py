"""`make gpu-check`: runs steps on this machine's GPU in order of value, and prints a table of their results.

The command needs Python 3.11 with this repository's packages, or a bare Python 3.12 with torch 2.11 and a pack of
`make gpu-pack`. Only the standard library is imported here. docs/measurements/gpu.md says what the steps show.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.lab.benchmarks.gpu import catalog
from tailrace.lab.benchmarks.gpu.card import card_name
from tailrace.lab.benchmarks.gpu.driver import ENDS_WELL, CheckStep, Processes, Say, StepEnded, drive, end
from tailrace.lab.benchmarks.gpu.place import Place, claim, libraries_of
from tailrace.lab.benchmarks.gpu.result_lines import LOG, ResultLines, ending, foreign, table
from tailrace.lab.benchmarks.gpu.unpacked import PYTHON, archives_of, unpack

TEMPORARY = Path(tempfile.gettempdir())
DRIVER = "driver"


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tailrace.lab.benchmarks.gpu.check", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--list", action="store_true", help="list the steps with the seconds expected, and end")
    parser.add_argument("--only", default="", metavar="NAMES", help="steps by name, with commas; `first` and `second`"
                        " name those of two calls of minutes each")  # fmt: skip
    parser.add_argument("--until", type=float, default=560.0, metavar="S", help="seconds after which no step begins"
                        " that would not end; 560")  # fmt: skip
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="the folder that `make gpu-pack` made; without it"
                        " the packages that are installed")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path(os.environ.get("OUT") or "out/gpu"),
                        help="results.jsonl, which is appended to, and log.txt; $OUT, else out/gpu")  # fmt: skip
    parser.add_argument("--room", type=Path, metavar="FOLDER", default=TEMPORARY / "tailrace-gpu",
                        help="unpacked packages, models, caches: gigabytes; a folder of its own in the temporary"
                        " directory")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps: is the chain whole?")
    parser.add_argument("--dry", action="store_true", help="without a GPU: on CPUs, in this process, small; steps that"
                        " need a card are imported alone")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the results as one JSON object instead of a table")
    found = parser.parse_args(given)
    found.only = [name for name in found.only.split(",") if name]
    found.out, found.room = found.out.resolve(), found.room.resolve()
    found.pack = found.pack and found.pack.resolve()
    return found


class BadGiven(Exception):
    """Invalid arguments; the text is one line that names the option."""


def check_given(asked: argparse.Namespace) -> None:
    """Raises BadGiven if an argument is invalid."""
    for name in asked.only:
        if not catalog.named(name):
            raise BadGiven(f"--only {name}: no step of this name; --list has them")
    if asked.pack is not None and not archives_of(asked.pack):
        raise BadGiven(f"--pack {asked.pack}: no archives there; build it with `make gpu-pack`")
    if asked.pack is not None and sys.version_info[:2] != PYTHON:
        raise BadGiven(f"--pack {asked.pack}: its packages are of Python 3.12; run python3.12, or leave out --pack")
    if name := foreign(asked.out):
        raise BadGiven(f"--out {asked.out}: {name} there is of no check; name another folder")


def listed() -> str:
    """Returns the catalog as text, with the sum of the expected seconds of each call."""
    titles = {1: "first", 2: "second", 3: "others"}
    lines = []
    for call, title in titles.items():
        steps = [step for step in catalog.STEPS if step.call == call]
        lines.append(f"{title}: {sum(step.expected_s for step in steps):.0f} s expected")
        lines += [f"  {step.name:21}{step.expected_s:4.0f} s  {step.shows}" for step in steps]
    return "\n".join(lines)


def in_this_process(place: Place):
    """Returns a Run for a dry run. It runs all steps in this process, so vLLM is imported once."""
    from tailrace.lab.benchmarks.gpu.steps.__main__ import look_at, run_step

    def run(step: CheckStep, _settings: dict[str, str], _limit_s: float) -> StepEnded:
        return run_step(step, place) if step.dry else look_at(step, place)

    return run


@contextmanager
def written_to(log) -> Iterator[None]:
    """Redirects stdout and stderr of this process and its children to the open file `log`, until the block ends."""
    kept = [(os.dup(fd), fd) for fd in (1, 2)]
    sys.stdout.flush()
    for _, fd in kept:
        os.dup2(log.fileno(), fd)
    try:
        yield
    finally:
        sys.stdout.flush()
        for copy, fd in kept:
            os.dup2(copy, fd)
            os.close(copy)


def checked(given: argparse.Namespace, card: str | None, results: ResultLines, say: Say) -> dict[str, str]:
    """Unpacks the pack, if there is one, and runs the steps. Returns how each step ended, by name."""
    began_s, steps = time.monotonic(), catalog.of(given.only)
    place = Place(given.room, given.out, card is not None, given.small or given.dry)
    if given.pack is not None and (seconds := unpack(given.pack, given.room)) is not None:
        say(results.add(DRIVER, end="unpacked", s=round(seconds, 1)))
    until_s = given.until - (time.monotonic() - began_s)
    with (given.out / LOG).open("ab") as log:
        if given.dry:
            os.environ.update(place.environment())
            with written_to(log):
                return drive(steps, in_this_process(place), results, until_s, say)
        processes = Processes(lambda step: place.command(step.name), lambda step: environment_of(step, place), log)
        warm = processes.start(catalog.WARM_UP, {})
        try:
            return drive(steps, processes, results, until_s, say)
        finally:
            end(warm)


def environment_of(step: CheckStep, place: Place) -> dict[str, str]:
    return place.environment() | (libraries_of(place.site) if step.name == "pool" else {})


def main(given: list[str]) -> int:
    """Runs the command. Returns the exit code: 0 if each step is done or had no time left, 1 if one failed, was killed
    or found tokens that differ at `bits`, or if the command was interrupted, 2 on bad input.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: else the running step would keep the GPU
    asked = arguments(given)
    if asked.list:
        print(listed())
        return 0
    card = None if asked.dry else card_name()
    try:
        check_given(asked)
        if card is None and not asked.dry:
            raise BadGiven("no CUDA device here; run it on a machine with one, or with --dry")
        if reason := claim(asked.room):
            raise BadGiven(f"--room {asked.room}: {reason}")
    except BadGiven as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    results, terminal = ResultLines(asked.out), os.fdopen(os.dup(2 if asked.json else 1), "w")
    print(f"card: {card or 'none (dry run on CPUs)'}", file=terminal, flush=True)
    offset = results.size()
    results.add(DRIVER, card=card, small=asked.small or asked.dry, until_s=asked.until)
    try:
        ends = checked(asked, card, results, lambda line: print(ending(line), file=terminal, flush=True))
    except KeyboardInterrupt:
        print(f"gpu-check: interrupted; {results.path} has the results so far", file=sys.stderr)
        return 1
    lines = results.since(offset)
    print(json.dumps({"card": card, "ends": ends, "results": lines}) if asked.json else table(lines))
    return 0 if all(how in ENDS_WELL for how in ends.values()) else 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # skips the shutdown of a dry run's vLLM engines: an engine beside a pool hangs in it
