"""Replicas of a simulated cluster that are given back and start again."""

import pytest

from tailrace.lab.simulator.chunks import FreedKv, GroupProgress, SimulatedChunk, SimulatedSample
from tailrace.lab.simulator.fleet import ModelledFleet
from tailrace.lab.simulator.speculation import PlainDecoding
from tailrace.lab.simulator.types import Cluster, ReplicaModel, StepModel, WorkloadGroup

MODEL = ReplicaModel(
    step=StepModel(0.01, 0.0001, 0.0),
    kv_capacity_tokens=1_000,
    max_running=8,
    prefill_tokens_s=1_000.0,
    fetch_tokens_s=0.0,
    fetch_base_s=0.0,
    start_s=20.0,
    stop_s=5.0,
)


@pytest.fixture
def fleet() -> ModelledFleet:
    found = ModelledFleet(Cluster(MODEL, 3), lambda index: PlainDecoding(), None)
    found.joins(range(3), True, 0.0)
    return found


def test_a_replica_that_starts_again_has_no_kv_of_its_life_before(fleet):
    progress, last = GroupProgress(WorkloadGroup("g", 100, (50,)), 0), fleet.replicas[2]
    sample = SimulatedSample(progress, 0, 0.0)
    sample.fresh, sample.freed_kv = 0, FreedKv(2, 0.0, 900.0)

    def computed() -> int:
        chunk = SimulatedChunk("c", sample, 10, 50, (0, 0))
        chunk.replica = last
        fleet.bring(chunk, None, 0.0)
        return chunk.prefill

    assert (computed(), computed()) == (0, 0), "it is here"
    fleet.resize(2, 1.0)
    fleet.resize(3, 2.0)
    fleet.joins((2,), True, 30.0)
    assert computed() == 100
