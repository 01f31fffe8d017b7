"""Gradients of groups that ended before their turn, held until it comes.

Invariant: adding a held gradient gives the bits that computing it in its turn gives: a tensor's gradient reaches
`grad` in one addition either way.
"""

from collections.abc import Iterable

import torch


class HeldGradients:
    """`parameters`: of the model. Memory: one more copy of all gradients for each one held."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self._parameters = [each for each in parameters if each.requires_grad]
        self._sum: list[torch.Tensor | None] | None = None
        self._held: dict[int, list[torch.Tensor | None]] = {}

    def set_sum_aside(self) -> None:
        """Before a backward pass out of turn: `grad` is empty, the sum so far is kept."""
        self._sum = self._take()

    def hold(self, place: int) -> None:
        """After it: keep `grad` under `place`, and put the sum back."""
        self._held[place] = self._take()
        for parameter, gradient in zip(self._parameters, self._sum, strict=True):
            parameter.grad = gradient
        self._sum = None

    def add(self, place: int) -> None:
        """Add the gradient held under `place` to the sum."""
        for parameter, gradient in zip(self._parameters, self._held.pop(place), strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    def scale(self, factor: float) -> None:
        """Multiply the sum."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad *= factor

    def _take(self) -> list[torch.Tensor | None]:
        taken = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return taken
