"""Figures of `bench train` from rows of a ledger, without a training."""

import pytest

from tailrace.app.train.record.ledger import LedgerRow, Seconds, Staleness
from tailrace.lab.benchmarks.live.train import figures

SECONDS = {"rollout": 3.0, "rewards": 0.0, "weights": 0.5, "train": 1.5}


def row(step_s: float, idle_replica_s: float) -> LedgerRow:
    return LedgerRow.model_construct(
        seconds=Seconds.model_construct(step=step_s, **SECONDS),
        replica_s=2 * step_s,
        idle_replica_s=idle_replica_s,
        trainer_cpu_s=2.0,
        staleness=Staleness(mean=0.5, max=1),
        reward_mean=0.25,
        groups_without_gradient=1,
        weights_checksum="ab",
    )


@pytest.mark.parametrize(("cores", "engine_core_s", "bound_share"), [(1, 7.5, 0.95), (4, 30.0, 0.8)])
def test_a_replica_s_second_is_a_second_of_each_of_its_cores(cores, engine_core_s, bound_share):
    found = figures([row(4.0, 1.0), row(6.0, 4.0)], replicas=2, cores=cores)
    assert (found["step_s"], found["idle_share"], found["trainer_core_s"]) == (5.0, 0.25, 2.0)
    assert (found["engine_core_s"], found["bound_share"]) == (engine_core_s, bound_share)
    assert (found["groups_without_gradient"], found["staleness"], found["reward"]) == (2, 0.5, 0.25)
