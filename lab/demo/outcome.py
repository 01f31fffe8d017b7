"""The outcome of the demo: the journals of both runs, and the figures of one against the other. Times are in seconds.

A live demo and a replay of the packaged one are both read from a folder with two journals and `about.json`. Called by
the demo's page and by `tailrace demo`.
"""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailrace.app.commands.rollout import JOURNAL
from tailrace.app.errors import BadInput
from tailrace.app.files.output_file import OutputFile, OutputKind
from tailrace.lab.simulator.report import number, percent, summary
from tailrace.lab.timeline.record import Record, record

ABOUT = OutputKind("the figures of a demo", (b'{\n "cores": ',))

RECORDED = Path(__file__).parent / "recorded"
"""Folder of a recorded live demo, in the package."""

NAMES = {"static": "static groups", "tailrace": "tailrace"}
"""Names of the runs, the baseline first, and their titles."""

HEADS = ["", "makespan s", "tail s", "tail", "tokens/s", "idle", "moves"]


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """`records`: by name of the run. `about`: cores, replicas, version, and how many samples have the same tokens in
    both runs.
    """

    records: Mapping[str, Record]
    about: Mapping[str, int | str]

    def figures(self) -> dict:
        """Returns the simulator's summary by run. `ratio` and `tail_ratio`: the baseline's seconds over Tailrace's."""
        runs = {name: summary(of_run.run) for name, of_run in self.records.items()}
        static, ours = runs.values()
        return {
            "runs": runs,
            "ratio": round(static["makespan_s"] / ours["makespan_s"], 3),
            "tail_ratio": round(static["tail_s"] / ours["tail_s"], 3) if ours["tail_s"] else None,
            **self.about,
        }


def output_files(folder: Path) -> dict[str, OutputFile]:
    """Returns the files to be written, by run, and `about`. Raises BadInput if a file holds something else."""
    files = {name: OutputFile(_journal(folder, name), "--out", JOURNAL) for name in NAMES}
    return files | {"about": OutputFile(folder / "about.json", "--out", ABOUT)}


def write(folder: Path, journals: Mapping[str, str], about: Mapping[str, int | str]) -> None:
    """Writes the files that `read` reads. gzip stores no time, so the same runs give the same bytes."""
    files = output_files(folder)
    for name, journal in journals.items():
        files[name].write(gzip.compress(journal.encode(), mtime=0))
    files["about"].write(json.dumps(about, indent=1) + "\n")


def read(folder: Path) -> DemoOutcome:
    """Reads a demo. Raises BadInput if a file is missing or damaged."""
    records = {}
    try:
        about = json.loads((folder / "about.json").read_text())
        for name in NAMES:
            with gzip.open(_journal(folder, name), "rt", encoding="utf-8") as lines:
                records[name] = record(lines)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadInput(f"{folder}: holds no demo: {error}; `tailrace demo --out {folder}` makes one") from error
    return DemoOutcome(records, about)


def table(figures: Mapping) -> list[list[str]]:
    """Returns the heads, then a row for each run."""
    return [HEADS, *(_row(NAMES[name], run) for name, run in figures["runs"].items())]


def _row(name: str, run: Mapping) -> list[str]:
    seconds = [number(run["makespan_s"]), number(run["tail_s"])]
    shares = [percent(run["tail_share"]), number(run["tokens_per_s"]), percent(run["idle_share"])]
    return [name, *seconds, *shares, f"{run['moves']:,}"]


def _journal(folder: Path, name: str) -> Path:
    return folder / f"{name}.journal.gz"
