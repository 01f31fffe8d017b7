"""Performance records for tests: replicas whose decode steps take a base and a time for each chunk."""

from tailrace.policies.protocol.events import ReplicaMeasured
from tailrace.policies.protocol.performance import Performance


def performance(
    prefill=1_000.0, fetch=10_000.0, fetch_base=0.01, base=0.02, chunk=0.001, at=0.0, **others
) -> Performance:
    """`prefill`, `fetch`: tokens a second; 0: not measured, or it cannot fetch."""
    rates = {"prefill_token_s": 1 / prefill if prefill else 0.0, "fetch_token_s": 1 / fetch if fetch else 0.0}
    return Performance.linear(at, base, chunk, fetch_base_s=fetch_base, **rates, **others)


def measured(now: float, replica_id: str, *figures: float, **others) -> ReplicaMeasured:
    """The event of a replica of this performance."""
    return ReplicaMeasured(now, replica_id, performance(*figures, **others))
