"""Routed experts of a trainer's rows, a row being a prompt with its answer: those of the sample that ended it.

Invariant: routes are found by all tokens of a row, never by its place, since the trainer may call tools between two
samples of a row. The prompt of a later turn is the row before it, so its routes are those of the whole row.
"""

from collections.abc import Sequence

from tailrace.app.errors import Failed
from tailrace.deployments.results.routed_experts import RoutedExperts


class RowRoutes:
    """The routes of the samples of one step. Equal rows have theirs in the order in which they were added."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[RoutedExperts | None]] = {}

    def add(self, prompt: Sequence[int], answer: Sequence[int], routes: RoutedExperts | None) -> None:
        """Keeps the routes of a sample. Raises Failed if they are not of all its tokens but the last."""
        tokens = (*prompt, *answer)
        if routes is not None and len(routes) != len(tokens) - 1:
            raise Failed(f"a sample of {len(tokens)} tokens has {len(routes)} rows of routed experts, not one less")
        self._known.setdefault(tokens, []).append(routes)
        self._known.setdefault(tokens[: len(prompt)], []).append(routes)  # of a row that ends before a last answer

    def take(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[RoutedExperts | None]:
        """Returns the routes of rows, None where there are none, and forgets all. A row that has no token of its last
        answer has them without the answer's.
        """
        found = [self._next((*prompt, *answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        self._known = {}
        return found

    def _next(self, tokens: tuple[int, ...]) -> RoutedExperts | None:
        routes = self._known.get(tokens)
        one = routes.pop(0) if routes else None
        return one if one is None else RoutedExperts(one.array[: len(tokens)])
