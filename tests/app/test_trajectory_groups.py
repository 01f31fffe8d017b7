"""Groups of trajectories whose harness ends otherwise than it should."""

import asyncio
from types import SimpleNamespace

import pytest

from tailrace.app.http.trajectory_groups import played_groups


class Opened(SimpleNamespace):
    """A trajectory that has been opened. `closed`: indexes of those that were closed."""

    async def close(self):
        self.closed.append(self.index)
        return "rows"

    async def reward(self, reward):
        return reward


def played(play, closed):
    async def opened(group, index):
        return Opened(index=index, closed=closed)

    return played_groups(opened, {"a": 1, "b": 2}, play, samples=2, at_once=4)


async def cancels_its_own_task():
    tool = asyncio.create_task(asyncio.sleep(60))
    tool.cancel()
    await tool


async def exits():
    raise SystemExit(2)


@pytest.mark.parametrize("fails", [cancels_its_own_task, exits])
def test_a_harness_that_cancels_its_own_task_or_exits_ends_its_trajectory_alone(fails):
    async def play(trajectory, task):
        if (task, trajectory.index) == (1, 0):
            await fails()
        return 0.5

    async def story():
        closed = []
        return {group.group: group.trajectories async for group in played(play, closed)}, closed

    found, closed = asyncio.run(story())
    assert [one.rows for one in (*found["a"], *found["b"])] == ["rows", 0.5, 0.5, 0.5] and closed == [0]
    assert [type(one.error) for one in found["a"]] == [type(found["a"][0].error), type(None)]
    assert isinstance(found["a"][0].error, RuntimeError | SystemExit)


def test_a_loop_that_is_cancelled_closes_all_trajectories():
    async def story():
        closed, begun = [], asyncio.Event()

        async def play(trajectory, task):
            begun.set()
            await asyncio.sleep(60)

        async def read():
            async for _ in played(play, closed):
                pass

        reader = asyncio.create_task(read())
        await begun.wait()
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        for _ in range(10):
            await asyncio.sleep(0)
        return closed

    assert sorted(asyncio.run(story())) == [0, 0, 1, 1]
