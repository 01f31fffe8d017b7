"""Weights that a trainer has copied into its node's shared memory, before any replica loads them."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tailrace.deployments.staging.slots import Slots
from tailrace.deployments.staging.stage import Stage, bytes_of, pairs_of

Tensors = Mapping[str, object] | Iterable[tuple[str, object]]


@dataclass(frozen=True)
class StagedWeights:
    """Weights in this node's shared memory that no replica has loaded. `seconds`: duration of the copy."""

    version: int
    tensors: int
    staged_bytes: int
    seconds: float
    stage: Stage

    def drop(self) -> None:
        """Frees their memory; nothing was committed."""
        self.stage.drop()


def staged_in(slots: Slots, version: int, served: tuple[int, str], tensors: Tensors) -> StagedWeights:
    """Copies tensors into a slot of this node. `served`: version and digest of the present weights."""
    began_s = time.monotonic()
    stage = Stage(slots, version, served, bytes_of(tensors))
    try:
        for name, tensor in pairs_of(tensors):
            stage.add(name, tensor)
    except BaseException:  # any error: it is raised again
        stage.drop()
        raise
    return StagedWeights(version, stage.tensors, stage.staged_bytes, time.monotonic() - began_s, stage)
