"""The virtual clock: an instant's calls run in their order, or in any that real processes allow, by seed."""

import asyncio
from random import Random

import pytest

from tailrace.lab.fuzz.virtual_time import Process, VirtualLoop


def history(orders: Random | None) -> list[str]:
    """Three calls of each of two processes, all at one instant, and two timers of one time."""
    seen: list[str] = []

    async def calls(name: str) -> None:
        for number in range(3):
            seen.append(f"{name}{number}")
            await asyncio.sleep(0)

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        tasks = [Process(name).spawn(calls(name)) for name in "ab"]
        await asyncio.gather(*tasks)
        for timer in ("one", "two"):
            loop.call_later(1.0, seen.append, timer)
        await asyncio.sleep(2.0)
        assert loop.time() == 2.0

    loop = VirtualLoop(orders)
    loop.run_until_complete(whole())
    loop.close()
    assert loop.errors == []
    return seen


def test_without_orders_there_is_one_history():
    assert history(None) == ["a0", "b0", "a1", "b1", "a2", "b2", "one", "two"]


@pytest.fixture(scope="module")
def histories():
    return [history(Random(seed)) for seed in range(400)]


def test_with_orders_every_interleaving_comes_and_each_process_keeps_its_own(histories):
    assert {tuple(each[6:]) for each in histories} == {("one", "two"), ("two", "one")}
    interleavings = {"".join(call[0] for call in each[:6]) for each in histories}
    assert len(interleavings) == 20, "three of one among six places"
    for name in "ab":
        assert all(
            [call for call in each[:6] if call[0] == name] == [f"{name}{n}" for n in range(3)] for each in histories
        )


def test_an_order_is_a_function_of_its_seed(histories):
    assert [history(Random(seed)) for seed in range(20)] == histories[:20]
