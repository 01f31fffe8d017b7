"""Whole groups of trajectories: a harness plays each trajectory, and a group is returned once all of its have ended."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tailrace.app.http.trajectory import CapturedTrajectory, TrajectoryRows
from tailrace.deployments.messages.errors import is_own_cancel

Task = TypeVar("Task")
Play = Callable[[CapturedTrajectory, Task], Awaitable[float | None]]
"""Plays a trajectory of a task. Returns its reward, or None if it has none."""


@dataclass(frozen=True, slots=True)
class EndedTrajectory:
    """`error`: raised by the harness or by the reward, or None. `rows`: all turns; None if nothing is left of them, as
    after the limit of seconds.
    """

    index: int
    rows: TrajectoryRows | None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """`trajectories`: by index."""

    group: str
    trajectories: tuple[EndedTrajectory, ...]


async def played_groups(
    opened: Callable[[str, int], Awaitable[CapturedTrajectory]], tasks: Mapping[str, Task], play: Play, samples: int,
    at_once: int,
) -> AsyncIterator[TrajectoryGroup]:  # fmt: skip
    """Yields each group as its last trajectory ends. `opened`: opens a trajectory of a group and index."""
    room = asyncio.Semaphore(at_once)

    async def one(group: str, task: Task, index: int) -> EndedTrajectory:
        async with room:
            return await _played(await opened(group, index), task, play, index)

    async def whole(group: str, task: Task) -> TrajectoryGroup:
        async with asyncio.TaskGroup() as mates:
            ended = [mates.create_task(one(group, task, index)) for index in range(samples)]
        return TrajectoryGroup(group, tuple(mate.result() for mate in ended))

    groups = [asyncio.create_task(whole(group, task)) for group, task in tasks.items()]
    try:
        for group in asyncio.as_completed(groups):
            try:
                found = await group
            except ExceptionGroup as errors:  # the service's: a harness's error is a result
                raise errors.exceptions[0] from None
            yield found
    finally:
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)


async def _played(trajectory: CapturedTrajectory, task: Task, play: Play, index: int) -> EndedTrajectory:
    try:
        reward = await play(trajectory, task)
        return EndedTrajectory(index, await (trajectory.close() if reward is None else trajectory.reward(reward)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a harness's own error: its mates go on
        return EndedTrajectory(index, await _closed(trajectory), error)
    except asyncio.CancelledError:
        rows = await _closed(trajectory)
        if is_own_cancel():
            raise
        return EndedTrajectory(index, rows, RuntimeError("the harness was cancelled by a task of its own"))


async def _closed(trajectory: CapturedTrajectory) -> TrajectoryRows | None:
    try:
        return await trajectory.close()
    except (PermissionError, ValueError):  # it has ended: by its limit of seconds, or by who has its key
        return None
