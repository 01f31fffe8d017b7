"""Weights of a trainer of several processes."""

import sys
from types import SimpleNamespace

import pytest

from tailrace.app.calls.refused import WeightsRejected
from tailrace.app.errors import Failed
from tailrace.app.trl import weights_sender
from tailrace.app.trl.weights_sender import WeightsSender
from tailrace.deployments.messages.rollout import WeightsLoaded


class Refusing:
    """A service that refuses the first weights."""

    def __init__(self):
        self.refusals = ["no room"]

    def status_blocking(self):
        return SimpleNamespace(weights_version=0)

    def send_weights_blocking(self, version, tensors):
        if self.refusals:
            raise WeightsRejected(self.refusals.pop())
        return WeightsLoaded(version=version, digest="d", replicas=("r",))


def test_after_a_refusal_all_processes_gather_the_weights_again(monkeypatch):
    gathered, told = [], []

    def named_weights(trainer):
        gathered.append(trainer.accelerator.is_main_process)
        yield "w", 1.0

    def broadcast(values, from_process):
        told[:] = values if gathered[-1] else told
        return told

    monkeypatch.setattr(weights_sender, "named_weights", named_weights)
    monkeypatch.setitem(sys.modules, "accelerate.utils", SimpleNamespace(broadcast_object_list=broadcast))
    service, state = Refusing(), SimpleNamespace(global_step=3)
    accelerators = (SimpleNamespace(num_processes=2, is_main_process=is_main) for is_main in (True, False))
    first, second = (
        WeightsSender(SimpleNamespace(state=state, accelerator=accelerator), service) for accelerator in accelerators
    )
    with pytest.raises(WeightsRejected, match="no room"):
        first.send()
    with pytest.raises(Failed, match="first process has failed: WeightsRejected: no room"):
        second.send()
    for sender in (first, second, first, second):
        sender.send()
    assert gathered == [True, False] * 2 and first.version == 1
