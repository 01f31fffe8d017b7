"""A snapshot as a board shows it: rows by section and name. Pure, and with JSON's types alone.

A row must change only if what it shows does, so times are rounded.
"""

from collections.abc import Mapping
from typing import Any

from tailrace.deployments.feed.deltas import Sections
from tailrace.deployments.messages.status import (
    BatchStatus,
    FaultLog,
    PoolView,
    ReplicaStatus,
    SampleStatus,
    ServiceSnapshot,
)

CONTEXT_SOURCES = ("local_tokens", "pool_tokens", "recomputed_tokens")
POOL_FIELDS = ("keys", "dram_bytes", "dram_capacity_bytes", "ssd_bytes", "ssd_capacity_bytes", "evicted_keys")


def sections_of(snapshot: ServiceSnapshot, pool_keys: Mapping[int, int]) -> Sections:
    """Returns the rows of all sections. `pool_keys`: keys of the pool by weights version, empty while not known."""
    return {
        "service": service_row(snapshot),
        "replicas": {replica.replica_id: replica_row(replica) for replica in snapshot.replicas},
        "batches": {batch.core_id: batch_row(batch) for batch in snapshot.batches},
        "samples": {sample.sample_id: sample_row(sample) for sample in snapshot.longest},
        "waiting": snapshot.waiting_for,
        "acceptance": snapshot.acceptance,
        "contained": snapshot.contained,
        "faults": {str(fault.number): fault_row(fault) for fault in snapshot.faults},
        "pool": {} if snapshot.pool is None else pool_rows(snapshot.pool, pool_keys),
    }


def service_row(snapshot: ServiceSnapshot) -> dict[str, Any]:
    wanted = {} if snapshot.wanted is None else {"wanted": snapshot.wanted, "wanted_why": snapshot.wanted_why}
    return wanted | {
        "waiting": snapshot.waiting,
        "running": snapshot.running,
        "held": snapshot.held,
        "up": len(snapshot.replicas),
        "model": snapshot.model,
        "weights": snapshot.weights_version,
        "digest": snapshot.weights_digest[:12],
        "weights_from": snapshot.weights_source,
        "weights_problem": snapshot.weights_problem,
        "paused": snapshot.paused,
        "asleep": ", ".join(snapshot.asleep),
        "waits_for": snapshot.waits_for or "",
        "at_admission": ", ".join(snapshot.at_admission),
    }


def replica_row(replica: ReplicaStatus) -> dict[str, Any]:
    row = {
        "state": replica.state,
        "aside": replica.aside,
        "running": replica.running,
        "copies": replica.copies,
        "max": replica.max_running,
        "kv": round(replica.kv_used_share, 3),
        "weights": replica.weights_version,
        "node": replica.node_id,
        "made": replica.work.get("tokens", 0),
        "steps": replica.work.get("verifications", 0),
        "preempted": replica.preemptions,
        "drafted": {},
        "accepted": {},
    }
    for name, count in replica.work.items():
        kind, dot, source = name.partition(".")
        if dot and kind in ("drafted", "accepted") and count:
            row[kind][source] = count
    return row


def batch_row(batch: BatchStatus) -> dict[str, Any]:
    return {
        "name": batch.batch_id,
        "samples": batch.samples,
        "ended": batch.ended,
        "groups": batch.groups,
        "emitted": batch.emitted,
        "tokens": batch.tokens,
        "tail": batch.tail,
        "began_s": round(batch.began_s, 1),
    }


def sample_row(sample: SampleStatus) -> dict[str, Any]:
    return {
        "state": sample.state,
        "replica": sample.replica_id or "",
        "tokens": sample.tokens,
        "expected": sample.expected_tokens,
        "max": sample.max_tokens,
        "chunks": sample.chunks,
        "why": sample.why,
    }


def fault_row(fault: FaultLog) -> dict[str, Any]:
    return {
        "at_s": round(fault.at_s, 1),
        "sample": fault.sample_id,
        "replica": fault.replica_id,
        "text": fault.text,
    }


def pool_rows(pool: PoolView, keys: Mapping[int, int]) -> dict[str, Any]:
    """Returns the rows of a pool. `version.N`: bytes in use by weights version, if its `keys` are known."""
    rows: dict[str, Any] = {f"count.{name}": n for name, n in pool.counts.items() if name.startswith(CONTEXT_SOURCES)}
    rows |= {f"without.{name}": why for name, why in pool.problems.items()}
    if pool.status is None:
        return rows | {"down": pool.problem or "its master has not answered yet"}
    total, used = max(1, sum(keys.values())), max(pool.status["dram_bytes"], pool.status["ssd_bytes"])
    rows |= {f"version.{version}": used * count // total for version, count in keys.items()}
    return rows | {name: pool.status[name] for name in POOL_FIELDS}
