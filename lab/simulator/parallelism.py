"""Ways to divide GPUs into replicas of a model.

Invariant: a replica of a way is the simulator's, by its step model. Called by `tailrace plan`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tailrace.lab.simulator.hardware import MODELS, replica_model
from tailrace.lab.simulator.types import ReplicaModel


@dataclass(frozen=True, slots=True)
class Parallelism:
    """`tensor`: GPUs that share each layer's attention; `expert`: GPUs that share the experts, 1 for a dense model.
    `replicas`: replicas of the service. Inside a replica, expert / tensor ranks divide the requests if that is above 1.
    """

    tensor: int
    expert: int
    replicas: int

    @property
    def gpus_per_replica(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def data(self) -> int:
        """Returns the number of copies of the attention weights: each request is on one of them."""
        return self.replicas * (self.gpus_per_replica // self.tensor)


def parallelisms_of(model: str, gpus: int, gpus_per_node: int) -> Iterator[Parallelism]:
    """Yields the ways to divide `gpus`, small replicas first: sizes are powers of two, and all of them.

    A layer is shared within a node. Experts are shared over any number of GPUs, up to one for each expert, either with
    attention shared too or with attention on each GPU, for its own requests.
    """
    known = MODELS[model]
    for size in _sizes(gpus):
        if size <= gpus_per_node:
            yield Parallelism(size, size if known.experts else 1, gpus // size)
        if 1 < size <= known.experts:
            yield Parallelism(1, size, gpus // size)


def _sizes(gpus: int) -> list[int]:
    return sorted({1 << power for power in range(gpus.bit_length())} | {gpus})


def replica_of(gpu: str, model: str, parallelism: Parallelism) -> ReplicaModel:
    """Returns a replica of this way. Raises ValueError for an unknown name or if the weights do not fit."""
    return replica_model(gpu, model, parallelism.gpus_per_replica, share_attention=parallelism.tensor > 1)
