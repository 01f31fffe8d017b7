"""Requests of one group, joined: the first of them starts the whole group, each takes its own sample.

Invariant: the tokens of a request do not depend on which of them was first, nor on whether the others come at all.
One that comes after the group was taken, or KEPT_S after its end, has it made again: with the same tokens, if the
weights are the same.
Owned by the server, on its event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from uuid import uuid4

from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, SampleResult
from tailrace_verl.requests import Asked

KEPT_S = 600.0
"""A group that has ended waits for its missing requests: verl starts them together, so theirs failed before."""


class _Group:
    def __init__(self, task: asyncio.Task, size: int):
        self.task, self.missing = task, set(range(size))


class JoinedGroups:
    """`roll_out`: makes a batch of one group."""

    def __init__(self, roll_out: Callable[[RolloutBatch], Awaitable[GroupResult]], seed: int):
        self._roll_out, self._seed = roll_out, seed
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    async def sample(self, asked: Asked, priority: int = 0) -> SampleResult:
        """The sample asked for. Passes on the errors of `roll_out`."""
        name = asked.digest()
        group = self._groups.get(name)
        if group is None:
            batch = RolloutBatch(
                batch_id=f"verl-{name}-{uuid4().hex[:8]}",
                groups=(asked.group,),
                step=asked.step,
                seed=self._seed,
                priority=priority,
            )
            group = _Group(asyncio.create_task(self._roll_out(batch)), asked.group.samples)
            self._groups[name] = group
            group.task.add_done_callback(lambda task: self._ended(name, group))
        group.missing.discard(asked.index)
        if not group.missing:
            self._forget(name, group)
        result = await asyncio.shield(group.task)  # one that is cancelled must not end its mates
        return result.samples[asked.index]

    def _ended(self, name: str, group: _Group) -> None:
        if group.task.cancelled() or group.task.exception() is not None:
            self._forget(name, group)
        else:
            asyncio.get_running_loop().call_later(KEPT_S, self._forget, name, group)

    def _forget(self, name: str, group: _Group) -> None:
        if self._groups.get(name) is group:
            del self._groups[name]
