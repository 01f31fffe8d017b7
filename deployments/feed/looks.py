"""Looks at a coordinator: reads the rows of each section, and finds those that have changed since the look before.

Invariant: a look only reads. It costs a few microseconds for each replica and for each changed row, whatever the number
of samples. Called by `Feed`.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tailrace.deployments.batches.live_batches import LiveBatches
from tailrace.deployments.feed.acceptance import Acceptance
from tailrace.deployments.feed.deltas import Sections, change
from tailrace.deployments.feed.survey import Survey, tokens_of
from tailrace.deployments.feed.trails import Trails
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.status import PoolView
from tailrace.policies.core.request_buffer import Sample
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.sample_states import RUNNING, WAITING

POOL_LOOKS_PER_REPLICA = 1 / 32
"""Number of looks between two reads of the pool's counts, for each replica: a read sums over all replicas."""


class Watched(NamedTuple):
    """Parts of the coordinator, read only. `service`: returns fields of the service as a whole. `now`: its clock."""

    core: Callable[[], RolloutCore]
    reports: Callable[[], Mapping[str, EngineStats]]
    batches: LiveBatches
    trails: Trails
    acceptance: Acceptance
    pool: Callable[[], PoolView | None]
    service: Callable[[], dict[str, Any]]
    contained: Callable[[], Mapping[str, int]]
    now: Callable[[], float]


class Looks:
    """`known`: rows as of the last look, by section."""

    def __init__(self, watched: Watched):
        self._watched = watched
        self.keys: dict[int, int] = {}  # keys of the pool by weights version, set by `Feed`
        self.begin()

    def begin(self) -> None:
        """Starts over: the next look finds all rows new."""
        self._unix_s = time.time() - self._watched.now()  # computed once: a row must change only if its time does
        self._known: Sections = {}
        self._marks: dict[str, tuple] = {}  # marks of replicas
        self._survey, self._looks, self._made = Survey(), 0, 0

    def look(self) -> Sections:
        """Returns the rows that have changed, and None for removed ones."""
        watched, core, unix_s = self._watched, self._watched.core(), self._unix_s
        self._survey.look(core)
        changes: Sections = {"replicas": self._replicas(core)}
        sections = {
            "service": self._service(core),
            "batches": self._batches(unix_s),
            "samples": {sample.sample_id: self._sample(core, sample) for sample in self._survey.longest()},
            "waiting": dict(self._survey.waiting),
            "acceptance": watched.acceptance.row(),
            "contained": dict(watched.contained()),
            "faults": {
                str(fault.number): {"at_s": round(unix_s + fault.at_s, 1), "sample": fault.sample_id,
                                    "replica": fault.replica_id, "text": fault.text}
                for fault in watched.trails.faults
            },
        }  # fmt: skip
        if self._looks % max(1, round(POOL_LOOKS_PER_REPLICA * len(self._marks))) == 0:
            sections["pool"] = self._pool()
        for name, rows in sections.items():
            changes[name] = change(self._known.get(name, {}), rows)
            self._known[name] = rows
        self._looks += 1
        return changes

    # ---- sections ----------------------------------------------------------------------------------

    def _service(self, core: RolloutCore) -> dict[str, Any]:
        counts = core.counts()
        shown = {name: counts[name] for name in ("waiting", "running", "held")}
        return shown | {"made": self._made} | self._watched.service()

    def _batches(self, unix_s: float) -> dict[str, dict]:
        rows = {}
        for batch in self._watched.batches.all():
            samples, groups = batch.sizes
            rows[batch.core_id] = {
                "name": batch.message.batch_id,
                "samples": samples,
                "ended": batch.ended,
                "groups": groups,
                "emitted": groups - len(batch.groups),
                "tokens": batch.emitted_tokens + self._survey.tokens[batch.core_id],
                "tail": batch.is_in_tail,
                "began_s": round(unix_s + batch.submitted_s, 1),
            }
        return rows

    def _sample(self, core: RolloutCore, sample: Sample) -> dict[str, Any]:
        trail = self._watched.trails.get(sample.sample_id)
        last = trail.chunks[-1] if trail is not None and trail.chunks else None
        return {
            "state": sample.state.value,
            "replica": sample.last_replica or "",
            "tokens": tokens_of(sample),
            "expected": sample.expected_tokens,
            "max": sample.max_tokens,
            "chunks": sample.chunks,
            "why": _why(core, sample, "" if last is None else last.reason),
        }

    def _replicas(self, core: RolloutCore) -> dict[str, dict | None]:
        """Returns the changed rows, found by a mark of each, since a row itself takes longer to make."""
        reports, table, copies = self._watched.reports(), core.replicas, core.copies()
        changed: dict[str, dict | None] = {}
        marks = {}
        for view in table.views():
            name, report = view.replica_id, reports.get(view.replica_id)
            state = _state(table, name)
            mark = view.running, view.kv_free_tokens, view.weights_version, state, copies.get(name, 0), id(report)
            marks[name] = mark
            if self._marks.get(name) != mark:
                changed[name] = replica_row(view, state, table.aside(name), copies.get(name, 0), report)
        changed.update((name, None) for name in self._marks.keys() - marks.keys())
        self._count_made(changed)
        self._marks = marks
        return changed

    def _count_made(self, changed: Mapping[str, dict | None]) -> None:
        """Counts the tokens of all replicas since the first look; a replica that restarts counts from 0 again."""
        known = self._known.setdefault("replicas", {})
        for name, row in changed.items():
            if row is None:
                known.pop(name, None)
                continue
            before = known.get(name)
            self._made += max(0, row["made"] - before["made"]) if before else 0
            known[name] = row

    def _pool(self) -> dict[str, Any]:
        view = self._watched.pool()
        if view is None:
            return {}
        rows: dict[str, Any] = {f"count.{name}": n for name, n in view.counts.items() if name.startswith(TOKENS)}
        rows |= {f"without.{name}": why for name, why in view.problems.items()}
        if view.status is None:
            return rows | {"down": view.problem or "its master has not answered yet"}
        total = max(1, sum(self.keys.values()))
        used = max(view.status["dram_bytes"], view.status["ssd_bytes"])
        rows |= {f"version.{version}": used * keys // total for version, keys in self.keys.items()}
        return rows | {name: view.status[name] for name in POOL_FIELDS}


TOKENS = ("local_tokens", "pool_tokens", "recomputed_tokens")
POOL_FIELDS = ("keys", "dram_bytes", "dram_capacity_bytes", "ssd_bytes", "ssd_capacity_bytes", "evicted_keys")


def _why(core: RolloutCore, sample: Sample, reason: str) -> str:
    if sample.state is WAITING:
        return f"waits for {core.room_wanted(sample)}"
    return reason if sample.state is RUNNING else "waits for its next turn"


def _state(table, replica_id: str) -> str:
    if table.aside(replica_id):
        return "aside"
    if table.is_closing(replica_id):
        return "closing"
    return "ready" if table.is_ready(replica_id) else "not ready"


def replica_row(view, state: str, aside: str, copies: int, report: EngineStats | None) -> dict[str, Any]:
    """Returns the row of a replica. `copies`: number of its running chunks that race with another replica's."""
    row = {
        "state": state,
        "aside": aside,
        "running": view.running,
        "copies": copies,
        "max": view.max_running,
        "kv": round(1 - view.kv_free_tokens / max(1, view.kv_capacity_tokens), 3),
        "weights": view.weights_version,
        "node": view.node_id,
        "made": 0,
        "steps": 0,
        "preempted": 0,
        "drafted": {},
        "accepted": {},
    }
    if report is not None:
        row["made"], row["steps"] = report.work.get("tokens", 0), report.work.get("verifications", 0)
        row["preempted"] = report.preemptions
        for name, count in report.work.items():
            kind, dot, source = name.partition(".")
            if dot and kind in ("drafted", "accepted") and count:
                row[kind][source] = count
    return row
