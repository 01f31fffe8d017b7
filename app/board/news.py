"""Lines about changes between two states of a service: replicas, batches, weights, pauses, faults. Pure."""

from collections.abc import Iterator
from typing import Any

from tailrace.deployments.feed.deltas import Sections


def news(known: Sections, changes: Sections) -> list[str]:
    """Returns the lines. `known`: the state before the changes."""
    lines = [
        *_replicas(known.get("replicas", {}), changes.get("replicas", {})),
        *_batches(known.get("batches", {}), changes.get("batches", {})),
        *_service(known.get("service", {}), changes.get("service", {})),
        *_faults(known.get("faults", {}), changes.get("faults", {})),
        *_contained(known.get("contained", {}), changes.get("contained", {})),
    ]
    return sorted(lines)


def _replicas(known: dict[str, Any], changed: dict[str, Any]) -> Iterator[str]:
    for name, row in changed.items():
        before = known.get(name)
        if row is None:
            yield f"replica {name} has left"
        elif before is None:
            yield f"replica {name} has joined"
        elif row["state"] != before["state"] and row["state"] in ("closing", "aside"):
            yield f"replica {name} is {STATES[row['state']]}{row['aside']}"
        elif row["weights"] != before["weights"]:
            yield f"replica {name} holds weights {row['weights']}"


STATES = {"closing": "to be given back", "aside": "set aside: "}


def _batches(known: dict[str, Any], changed: dict[str, Any]) -> Iterator[str]:
    for name, row in changed.items():
        before = known.get(name)
        if row is None:
            yield f"batch {before['name'] if before else name} is over"
        elif before is None:
            yield f"batch {row['name']}: {row['samples']:,} samples came"
        elif row["tail"] and not before["tail"]:
            yield f"batch {row['name']} is in its tail"


def _service(known: dict[str, Any], changed: dict[str, Any]) -> Iterator[str]:
    if "weights" in changed and "weights" in known:
        yield f"weights {known['weights']} to {changed['weights']}"
    if "paused" in changed and "paused" in known:
        yield "paused" if changed["paused"] else "resumed"
    if changed.get("wanted") is not None and known:
        why = changed.get("wanted_why", known.get("wanted_why", ""))
        yield f"replicas wanted: {changed['wanted']}, {why}"
    if changed.get("weights_problem"):
        yield f"weights: {changed['weights_problem']}"


def _faults(known: dict[str, Any], changed: dict[str, Any]) -> Iterator[str]:
    for name, row in changed.items():
        if row is not None and name not in known:
            place = " on ".join(name for name in (row["sample"], row["replica"]) if name)
            yield f"{place}: {row['text']}"


def _contained(known: dict[str, int], changed: dict[str, int | None]) -> Iterator[str]:
    for name, count in changed.items():
        if known and count is not None and (more := count - known.get(name, 0)) > 0:
            yield f"contained: {name}, {more:+,}"
