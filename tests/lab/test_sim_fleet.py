"""Replicas of a simulated cluster that are given back and start again."""

import pytest

from tailrace.lab.simulator.chunks import FreedKv, GroupProgress, SimulatedChunk, SimulatedSample
from tailrace.lab.simulator.fleet import ModelledFleet
from tailrace.lab.simulator.host import SimulatedHost
from tailrace.lab.simulator.speculation import PlainDecoding
from tailrace.lab.simulator.types import Cluster, ReplicaModel, StepModel, Workload, WorkloadGroup
from tailrace.policies.families.registry import Policies

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


def test_a_replica_starts_once_the_one_before_it_has_left_its_gpus(fleet):
    fleet.resize(2, 100.0)
    assert (fleet.occupying(104.0), fleet.occupying(105.0)) == (3, 2)
    fleet.resize(3, 101.0)
    assert fleet.occupying(102.0) == 3, "never more than there are GPUs for"
    assert fleet.starting == {2: 105.0 + MODEL.start_s}


def test_a_start_that_was_called_off_is_no_part_of_the_next_one():
    """It is wanted at 10 s, not at 15 s and again at 20 s: it is up 20 s after that."""
    workload = Workload("w", 10, ((WorkloadGroup("g", 10, (10,)),),))
    host = SimulatedHost(
        workload=workload, fleet=ModelledFleet(Cluster(MODEL, 2), lambda index: PlainDecoding(), None),
        policies=Policies(), admission=True, reveal=False, elastic=None, spans=None, check=False, progress=None,
    )  # fmt: skip
    up: list[tuple[int, float]] = []
    host._begin = lambda: [host._at(s, host._resize, n) for s, n in ((0.0, 0), (10.0, 1), (15.0, 0), (20.0, 1))]
    host._acted = lambda: up.append((len(host._fleet.order), host._now))
    host.run()
    assert up == [(1, 40.0)]
