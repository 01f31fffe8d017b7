"""Weights that a worker receives by one of vLLM's transfer engines, kept apart from its model until they are committed.

Invariant: the model is not touched, so a transfer that breaks off changes nothing. The transfer engine loads into this
object as if it were the model. Owned by `ExactWorker`.
"""

from collections.abc import Iterable

from tailrace.deployments.staging.slots import Slots
from tailrace.deployments.staging.stage import Stage


class ReceivedWeights:
    """Tensors by name, in host memory: a GPU has no room for a second model."""

    def __init__(self) -> None:
        self.tensors: dict[str, object] = {}

    def load_weights(self, weights: Iterable[tuple[str, object]]) -> set[str]:
        """Stands in for a vLLM model's method. Returns the names. The caller may reuse its buffers afterwards."""
        found = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        self.tensors |= found
        return set(found)

    def stage(self, service: str, version: int, served: tuple[int, str]) -> str:
        """Puts them into a slot of this node. Returns the source to commit. Raises ValueError, one line."""
        if not self.tensors:
            raise ValueError(f"weights {version}: no tensor was received")
        stage = Stage(Slots(service), version, served, sum(tensor.nbytes for tensor in self.tensors.values()))
        try:
            for name, tensor in self.tensors.items():
                stage.add(name, tensor)
            return str(stage.seal())
        finally:
            stage.drop()
            self.tensors.clear()
