"""Roles of drivers, in rising order of rights, and their check at the ingress.

Invariant: a driver's call runs only if its role has the right. Roles guard against mistakes alone: a driver that can
reach Ray at all can run code on every node. Used by the coordinator and by clients.
"""

from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from inspect import isasyncgenfunction

from tailrace.deployments.messages.rollout import Rejected, RejectedBy


class Role(StrEnum):
    """Rights of a driver: its own, and those of the roles above it here."""

    OBSERVER = "observer"  # reads the status, follows the number of replicas
    EVALUATOR = "evaluator"  # rolls out
    TRAINER = "trainer"  # weights, policies, replicas, history, pool, other drivers' batches

    def includes(self, other: "Role") -> bool:
        return list(Role).index(self) >= list(Role).index(other)


def refusal(role: Role, needed: Role, call: str) -> Rejected | None:
    """Returns the refusal of a call by a role without its right, or None."""
    if role.includes(needed):
        return None
    reason = f"{call} needs role {needed.value}, and this client is {role.value}"
    return Rejected(reason=reason, by=RejectedBy.ROLE)


def admits(needed: Role) -> Callable:
    """Decorates a method at the ingress. The caller's role becomes its first argument; a refusal is returned as its
    answer.

    A refused stream yields the refusal alone.
    """

    def decorate(method: Callable) -> Callable:
        if isasyncgenfunction(method):

            @wraps(method)
            async def admitted(self, role: Role, *arguments):
                if (refused := refusal(Role(role), needed, method.__name__)) is not None:
                    yield refused
                    return
                items = method(self, *arguments)
                try:
                    async for item in items:
                        yield item
                finally:
                    await items.aclose()

        else:

            @wraps(method)
            async def admitted(self, role: Role, *arguments):
                refused = refusal(Role(role), needed, method.__name__)
                return await method(self, *arguments) if refused is None else refused

        admitted.needs = needed
        return admitted

    return decorate
