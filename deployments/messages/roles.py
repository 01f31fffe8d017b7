"""Roles of drivers, in rising order of rights, and their check at the ingress.

Invariant: a driver's call runs only if its role has the right. Roles guard against mistakes alone: a driver that can
reach Ray at all can run code on every node. Used by the coordinator and by clients.
"""

from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from functools import wraps
from inspect import isasyncgenfunction, isawaitable
from typing import Any

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
        return wraps(method)(_guarded(needed, method.__name__, method, isasyncgenfunction(method)))

    return decorate


class Passed:
    """A guarded method of a class, see `admits`: it passes its arguments to `target(self)`, and returns its answer.

    `is_stream`: the target returns an async generator.
    """

    def __init__(self, needed: Role, target: Callable[[Any], Callable], is_stream: bool = False):
        self._needed, self._target, self._is_stream = needed, target, is_stream

    def __set_name__(self, owner: type, name: str) -> None:
        def method(me, *arguments):
            return self._target(me)(*arguments)

        guarded = _guarded(self._needed, name, method, self._is_stream)
        guarded.__name__ = name
        setattr(owner, name, guarded)


def _guarded(needed: Role, name: str, method: Callable, is_stream: bool) -> Callable:
    async def guarded(self, role: Role, *arguments):
        if (refused := refusal(Role(role), needed, name)) is not None:
            return _alone(refused) if is_stream else refused
        answer = method(self, *arguments)
        return await answer if isawaitable(answer) else answer

    return guarded


async def _alone(refused: Rejected) -> AsyncIterator[Rejected]:
    yield refused
