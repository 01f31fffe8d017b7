"""The outcomes of mutants: a file that grows, what is explained, and the table."""

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

EXPLAINED = Path(__file__).parent / "explained.toml"


class MutantOutcome(NamedTuple):
    """`state`: found, survived, unreached (no test enters its function) or unplanted (it runs compiled or not at
    all), or unsure (the test that found it fails without it, too). `by`: its finder, or how many missed it."""

    key: str
    room: str
    stage: str
    state: str
    by: str
    seconds: float


class OutcomesFile:
    """One JSON line for each mutant and stage; the last line of a mutant counts."""

    def __init__(self, path: Path):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {row["key"]: MutantOutcome(**row) for row in map(json.loads, lines)}

    def add(self, outcome: MutantOutcome) -> None:
        self.known[outcome.key] = outcome
        with self._path.open("a") as file:
            file.write(json.dumps(outcome._asdict()) + "\n")


def explained() -> dict[str, str]:
    """Mutants that change nothing that anybody could see, by key, each with its reason."""
    return {one["key"]: one["why"] for one in tomllib.loads(EXPLAINED.read_text()).get("mutant", [])}


def table(rooms: list[str], outcomes: list[MutantOutcome]) -> list[dict]:
    """A row for each room: mutants, those found, survived and explained, and the share found of the others."""
    reasons = explained()
    rows = []
    for room in rooms:
        here = [one for one in outcomes if one.room == room]
        counts = Counter("explained" if one.state != "found" and one.key in reasons else one.state for one in here)
        judged = len(here) - counts["explained"] - counts["unplanted"] - counts["unsure"]
        names = ("found", "survived", "unreached", "unplanted", "unsure", "explained")
        share = round(counts["found"] / judged, 3) if judged else None
        rows.append({"room": room, "mutants": len(here), **{name: counts[name] for name in names}, "share": share})
    return rows
