"""The table of a suite: each test on the gateway and on `vllm serve`, and the tests that end differently.

Invariant: every test of either file is in one row. A difference that `known.toml` explains is told from a new one.
"""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVERS = ("ours", "stock")
NOT_RUN = {"outcome": "not run", "reason": "", "seconds": 0.0}
LOST = "THE SERVER GIVES NO ANSWER ANY MORE"
"""Begins the reason of the test after which no other was run."""


def load(folder: Path) -> dict[str, dict[str, dict]]:
    """Outcomes by server and test; an empty dict for a server whose file is not there."""
    files = {server: folder / f"{server}.json" for server in SERVERS}
    return {server: json.loads(file.read_text()) if file.exists() else {} for server, file in files.items()}


def rows(found: dict[str, dict[str, dict]]) -> list[tuple[str, dict, dict]]:
    """(test, outcome of ours, outcome of stock), in the order of the names."""
    names = sorted({name for outcomes in found.values() for name in outcomes})
    return [(name, *(found[server].get(name, NOT_RUN) for server in SERVERS)) for name in names]


def known_reason(name: str, known: dict[str, str]) -> str | None:
    """Why a test may pass on `vllm serve` alone: the reason of the first entry whose pattern is found in its name."""
    return next((reason for pattern, reason in known.items() if re.search(pattern, name)), None)


def differences(table: list[tuple[str, dict, dict]]) -> list[tuple[str, dict, dict]]:
    """Rows that passed on one server and failed on the other."""
    return [row for row in table if {row[1]["outcome"], row[2]["outcome"]} == {"passed", "failed"}]


def short(name: str) -> str:
    """The test's name without its folder."""
    return name.rpartition("/")[2]


def summary(table: list[tuple[str, dict, dict]]) -> str:
    said = []
    for place, server in enumerate(("gateway", "vllm serve"), start=1):
        counts = Counter(row[place]["outcome"] for row in table)
        said.append(f"{server}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    both = sum(row[1]["outcome"] == row[2]["outcome"] == "failed" for row in table)
    return f"{'; '.join(said)}; {both} failed on both"


def skips(table: list[tuple[str, dict, dict]]) -> list[str]:
    """A line for each reason of tests that both servers skip, with their number."""
    reasons = Counter(ours["reason"] for _, ours, stock in table if ours["outcome"] == stock["outcome"] == "skipped")
    return [f"{count} skipped: {reason}" for reason, count in sorted(reasons.items())]


def lines_of(table: list[tuple[str, dict, dict]], known: dict[str, str]) -> list[str]:
    """The printed table, then skips by reason, then each difference with its error, then the summary."""
    said = [
        f"{ours['outcome']:8}{stock['outcome']:8}{short(name)}"
        for name, ours, stock in table
        if not ours["outcome"] == stock["outcome"] == "skipped"
    ]
    said += skips(table)
    for name, ours, stock in differences(table):
        failed = ours if ours["outcome"] == "failed" else stock
        where = "gateway" if failed is ours else "vllm serve"
        reason = known_reason(name, known) if failed is ours else None
        said += ["", f"{short(name)}: fails on the {where} alone", f"    {failed['reason'][:300]}"]
        said += [f"    known: {reason}"] if reason else []
    return ["ours    stock   test", *said, "", summary(table)]


def main(folder: Path) -> int:
    """Prints the table. Returns 1 if a test that passes on `vllm serve` fails on the gateway without a known reason, or
    if the gateway was lost: the rest of the tests has not run.
    """
    table, known = rows(load(folder)), tomllib.loads((HERE / "known.toml").read_text())
    print("\n".join(lines_of(table, known)))
    fallen = [row for row in differences(table) if row[1]["outcome"] == "failed"]
    lost = any(ours["reason"].startswith(LOST) for _, ours, _ in table)
    return int(lost or any(known_reason(name, known) is None for name, *_ in fallen))
