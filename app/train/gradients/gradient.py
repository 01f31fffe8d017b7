"""The gradient of one backward pass, and sums of gradients in a fixed order.

Invariant: floating-point sums depend on their order, so terms are added in the order of their keys, whenever they come.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch

from tailrace.app.train.logprob_mismatch import LogprobMismatch


@dataclass
class Gradient:
    """`tensors`: one for each parameter, None where it has none. `loss`: of shape ()."""

    tensors: list[torch.Tensor | None]
    loss: torch.Tensor
    mismatch: LogprobMismatch = field(default_factory=LogprobMismatch)

    def add(self, other: "Gradient") -> None:
        """Adds another one in place; the other must not be used afterwards."""
        for index, (mine, theirs) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if mine is None:
                self.tensors[index] = theirs
            elif theirs is not None:
                mine.add_(theirs)
        self.loss = self.loss + other.loss
        self.mismatch.add(other.mismatch)

    def scale(self, factor: float) -> None:
        """Multiplies the tensors and the loss in place."""
        for tensor in self.tensors:
            if tensor is not None:
                tensor.mul_(factor)
        self.loss = self.loss * factor


class OrderedSum:
    """`order`: keys of all terms. Memory: the sum, and the terms that came before their turn."""

    def __init__(self, order: Iterable[Hashable]):
        self._order = deque(order)
        self._waiting: dict[Hashable, Gradient] = {}
        self._sum: Gradient | None = None

    def put(self, key: Hashable, term: Gradient) -> None:
        """Adds a term once all before it have been added."""
        self._waiting[key] = term
        while self._order and self._order[0] in self._waiting:
            due = self._waiting.pop(self._order.popleft())
            if self._sum is None:
                self._sum = due
            else:
                self._sum.add(due)

    @property
    def result(self) -> Gradient | None:
        """Returns the sum of all terms, or None while some are missing."""
        return None if self._order else self._sum
