"""The scheduler benchmark: it runs everything, and reports what its readers compare."""

import pytest
from rollout_machine import ORDERINGS

from tailrace.lab.benchmarks.control_plane.scheduler import CHUNK_TOKENS, MAX_TOKENS, drive, measure
from tailrace.policies.families.registry import Policies
from tailrace.policies.models.hashed_random import fraction


@pytest.mark.parametrize("ordering", [name for name in ORDERINGS if name != "oracle_longest_first"])
def test_a_drive_runs_every_sample_to_its_end(ordering):
    """As many decisions as the chunks that the lengths add up to, whatever the order."""
    policies = Policies(ordering=ordering, chunking={"type": "fixed", "chunk_tokens": CHUNK_TOKENS})
    lengths = [64 + int(MAX_TOKENS * fraction(0, f"g{g}#{i}") ** 3) for g in range(16) for i in range(16)]
    chunks = sum(-(-min(length, MAX_TOKENS) // CHUNK_TOKENS) for length in lengths)
    result = drive(256, 8, policies)
    assert result["decisions"] == chunks
    assert result["decisions_per_s"] == result["decisions"] / result["seconds"] > 0


def test_a_measurement_says_what_was_measured(monkeypatch):
    monkeypatch.setattr("tailrace.lab.benchmarks.control_plane.scheduler.REPEATS", 1)
    monkeypatch.setattr("tailrace.lab.benchmarks.control_plane.plans.PLANS", 1)
    monkeypatch.setattr("tailrace.lab.benchmarks.control_plane.plans.SIZES", ((128, 2), (256, 4)))
    result = measure(256, 4)
    assert set(result) == {
        "requests", "replicas", "decisions", "decisions_per_s", "cost_ratio", "cost_ratio_same_load", "plan_ms",
        "policies",
    }  # fmt: skip
    assert (result["requests"], result["replicas"]) == (256, 4)
    assert list(result["plan_ms"]) == ["128 x 2", "256 x 4"]
    assert Policies(**result["policies"]).chunking.chunk_tokens == CHUNK_TOKENS
