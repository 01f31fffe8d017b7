"""Two runs of the learner, compared step by step to the bit. Pure."""

from collections.abc import Sequence
from typing import Any

from tailrace.app.train.record.ledger import LedgerRow

COMPARED = ("reward_mean", "reward_std", "loss", "grad_norm", "weights_checksum")
"""Names of the fields that have to be equal. The checksum is of all bits of all parameters after the step."""


def first_difference(expected: Sequence[LedgerRow], got: Sequence[LedgerRow]) -> dict[str, Any] | None:
    """Returns the first step and field that differ, or None."""
    for wanted, found in zip(expected, got, strict=False):
        for name in COMPARED:
            if not _equal(getattr(wanted, name), getattr(found, name)):
                values = {"expected": getattr(wanted, name), "got": getattr(found, name)}
                return {"step": wanted.step, "field": name, **values}
    if len(expected) != len(got):
        counts = {"expected": len(expected), "got": len(got)}
        return {"step": min(counts.values()) + 1, "field": "steps", **counts}
    return None


def _equal(one: float | str, other: float | str) -> bool:
    """Returns whether two values are equal, or both NaN."""
    return one == other or str(one) == str(other) == "nan"
