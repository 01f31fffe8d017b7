"""Size of a service, as its coordinator has to know it: limits of the engines' number, and draft models."""

from typing import NamedTuple

from tailrace.policies.core.scaling import Limits


class ServiceSize(NamedTuple):
    """`limits`: minimum and maximum number of engines; None if it is fixed. `drafters`: maximum of draft models."""

    limits: Limits | None = None
    drafters: int = 0
