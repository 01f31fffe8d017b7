"""One look at a service as plain JSON for the page, and the news between two looks. Pure.

A look holds the present state; the page keeps none but the curves of the last minutes.
"""

import time
from collections.abc import Sequence
from typing import Any

from tailrace.app.watch.rates import Rates
from tailrace.app.watch.tables import pool_line, state_of, troubles
from tailrace.deployments.messages.status import ReplicaStatus, SampleStatus, ServiceStatus

DIGITS = 3


def look_of(at_s: float, status: ServiceStatus, rates: Rates, longest: Sequence[SampleStatus]) -> dict[str, Any]:
    """`at_s`: unix seconds. `rates`: this look has been added. `longest`: see `RolloutClient.longest_samples`."""
    return {
        "at_s": round(at_s, DIGITS),
        "model": status.model,
        "weights": status.weights_version,
        "digest": status.weights_digest[:12],
        "paused": status.paused,
        "troubles": troubles(status),
        "moment": moment_of(at_s, status, rates),
        "batches": [
            batch.model_dump() | {"tokens_per_s": _rounded(rates.batch(batch.batch_id))} for batch in status.batches
        ],
        "replicas": [_replica(replica, rates) for replica in status.replicas],
        "longest": [sample.model_dump() for sample in longest],
        "pool": "" if status.pool is None else pool_line(status.pool),
    }


def moment_of(at_s: float, status: ServiceStatus, rates: Rates) -> dict[str, Any]:
    """A point of the curves."""
    return {
        "at_s": round(at_s, DIGITS),
        "running": status.running,
        "waiting": status.waiting,
        "held": status.held,
        "replicas": sum(replica.ready for replica in status.replicas),
        "tokens_per_s": _rounded(rates.service()),
        "tail": any(batch.tail for batch in status.batches),
    }


def _replica(replica: ReplicaStatus, rates: Rates) -> dict[str, Any]:
    rate = rates.replica(replica.replica_id)
    return {
        "replica_id": replica.replica_id,
        "state": state_of(replica),
        "aside": replica.aside,
        "running": replica.running,
        "max_running": replica.max_running,
        "kv_used_share": round(replica.kv_used_share, DIGITS),
        "weights": replica.weights_version,
        "preemptions": replica.preemptions,
        "tokens_per_s": _rounded(rate.tokens_per_s),
        "tokens_per_step": _rounded(rate.tokens_per_step),
        "accepted": {name: round(part, DIGITS) for name, part in (rate.accepted or {}).items()},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def news(before: ServiceStatus | None, after: ServiceStatus) -> list[str]:
    """Lines about the changes between two looks: replicas, batches, weights, pauses, errors."""
    if before is None:
        return []
    found = []
    earlier = {replica.replica_id: replica for replica in before.replicas}
    here = {replica.replica_id: replica for replica in after.replicas}
    found += [f"replica {name} has joined" for name in here.keys() - earlier.keys()]
    found += [f"replica {name} has left" for name in earlier.keys() - here.keys()]
    for name in here.keys() & earlier.keys():
        if here[name].aside and not earlier[name].aside:
            found.append(f"replica {name} is set aside: {here[name].aside}")
        if here[name].closing and not earlier[name].closing:
            found.append(f"replica {name} is to be given back")
    batches = {batch.batch_id: batch for batch in before.batches}
    now = {batch.batch_id: batch for batch in after.batches}
    found += [f"batch {name}: {now[name].samples:,} samples came" for name in now.keys() - batches.keys()]
    found += [f"batch {name} is over" for name in batches.keys() - now.keys()]
    both = now.keys() & batches.keys()
    found += [f"batch {name} is in its tail" for name in both if now[name].tail and not batches[name].tail]
    if after.weights_version != before.weights_version:
        found.append(f"weights {before.weights_version} to {after.weights_version}")
    if after.paused != before.paused:
        found.append("paused" if after.paused else "resumed")
    for name, count in after.contained.items():
        if (more := count - before.contained.get(name, 0)) > 0:  # a new coordinator counts from 0
            found.append(f"contained: {name}, {more:+,}")
    return sorted(found)


def line(text: str) -> dict[str, Any]:
    """An entry of the page's log."""
    return {"at_s": round(time.time(), DIGITS), "text": text}
