"""Mutation test: small changes of the rooms that matter, each alone, and the tests that find them.

    PYTHONPATH=tests python -m mutants.run [--room NAME] [--per-room N] [--jobs N] [--again] [--out FILE] [--json]

Each mutant is tried with the pure tests that enter its function, then, if it survives, with those of the simulated
service. The outcomes are added to --out as they come, and a later run goes on from there. Module level code, default
values, texts and compiled kernels have no mutants. Exit code 0: all rooms reach their share; 1: one does not; 2: bad
input.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from mutants.loop import MutantLoop
from mutants.mutant import ROOT, Mutant
from mutants.outcomes import MutantOutcome, OutcomesFile, explained, table
from mutants.reach import ReachFile
from mutants.rooms import ROOMS, STAGES, drawn

ASKED = {"core": 0.9, "coordinator": 0.9, "batches": 0.9}
ASKED_ELSEWHERE = 0.8


def waiting(mutants: list[Mutant], stage: str, known: dict[str, MutantOutcome], again: bool) -> list[Mutant]:
    """Those that this stage has not tried and that no earlier one found."""
    stages = list(STAGES)

    def left(one: MutantOutcome | None) -> bool:
        return one is None or (one.state != "found" and (again or stages.index(one.stage) < stages.index(stage)))

    return [one for one in mutants if left(known.get(one.key))]


def stage_run(stage: str, rooms: dict[str, list[Mutant]], asked, file: OutcomesFile) -> None:
    """One stage, in a process of its own, since the tests of two cannot share their imports."""
    sys.stdout.flush()
    if os.fork():
        if os.wait()[1]:
            raise SystemExit(1)
        file.__init__(Path(asked.out))
        return
    room_of = {one.key: room for room, mutants in rooms.items() for one in mutants}
    wanted = [one for mutants in rooms.values() for one in waiting(mutants, stage, file.known, asked.again)]
    done = 0

    def note(mutant: Mutant, state: str, by: str, seconds: float) -> None:
        nonlocal done
        done += 1
        before = file.known.get(mutant.key)
        if before and before.state == "survived" and state in ("unreached", "unplanted"):
            state, by = "survived", before.by
        file.add(MutantOutcome(mutant.key, room_of[mutant.key], stage, state, by, round(seconds, 1)))
        print(
            f"{stage} {done}/{len(wanted)} {state:9} {seconds:6.1f} s  {mutant.key}  {by}", file=sys.stderr, flush=True
        )

    code = 0
    os.dup2(2, 1)  # what tests and pytest print is no output of this command
    if wanted:
        options = ["-s", "-p", "no:cacheprovider", "--hypothesis-profile", "unshrunk", *STAGES[stage]]
        reach = ReachFile(Path(asked.out).with_suffix(f".{stage}.reach.json"))
        code = pytest.main(options, plugins=[MutantLoop(wanted, reach, asked.jobs, asked.budget, note)])
    os._exit(0 if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else 1)


def shown(rows: list[dict]) -> str:
    titles = list(rows[0])
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *("| " + " | ".join(str(row[title]) for title in titles) + " |" for row in rows)])


def options() -> argparse.Namespace:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument(
        "--room", choices=sorted(ROOMS), action="append", help="mutants of this room alone; may be given again"
    )
    given.add_argument("--per-room", type=int, default=60, help="mutants drawn of each room; 0: all (days)")
    given.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    given.add_argument("--budget", type=float, default=60.0, help="seconds of tests for a mutant in each stage")
    given.add_argument("--again", action="store_true", help="try those again that survived")
    given.add_argument("--show", action="store_true", help="no run: the table and the survivors of --out")
    given.add_argument("--out", default="out/mutants.jsonl", help="file of outcomes; a run goes on from it")
    given.add_argument("--json", action="store_true", help="print one JSON document at the end")
    return given.parse_args()


def main() -> None:
    asked = options()
    os.chdir(ROOT)
    rooms = {room: drawn(room, asked.per_room) for room in asked.room or ROOMS}
    file = OutcomesFile(Path(asked.out))
    for stage in () if asked.show else STAGES:
        stage_run(stage, rooms, asked, file)
    keys = {one.key for mutants in rooms.values() for one in mutants}
    outcomes = [one for one in file.known.values() if one.key in keys]
    rows, reasons = table(list(rooms), outcomes), explained()
    survivors = [one for one in outcomes if one.state in ("survived", "unreached") and one.key not in reasons]
    if asked.json:
        print(json.dumps({"rooms": rows, "survivors": [one._asdict() for one in survivors]}, indent=1))
    else:
        print("\n".join(f"{one.state} {one.key}" for one in survivors))
        print(shown(rows))
    reached = all((row["share"] or 0.0) >= ASKED.get(row["room"], ASKED_ELSEWHERE) for row in rows)
    raise SystemExit(0 if reached else 1)


if __name__ == "__main__":
    main()
