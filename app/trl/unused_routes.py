"""A word on routed experts that come and are not replayed: TRL's asynchronous trainer has no column for them.

It folds samples into a tree and computes a token once for all that share it, while samples that continue under new
weights may have other experts for it.
"""

import logging
from collections.abc import Iterable
from functools import cache

from tailrace.deployments.results.routed_experts import RoutedExperts

LOGGER = logging.getLogger("tailrace")


def warn_of_routes(routes: Iterable[RoutedExperts | None]) -> None:
    """Logs a warning, once in a process, if samples have any."""
    if any(one is not None for one in routes):
        _warn()


@cache
def _warn() -> None:
    LOGGER.warning("AsyncGRPOTrainer does not replay the engines' routed experts: its routers choose for themselves")
