"""When full collections of garbage come."""

import asyncio
import gc

from tailrace.deployments import garbage


def test_one_comes_when_the_service_becomes_idle_and_one_after_a_time(monkeypatch):
    """On a clock of its own: looks are made as fast as the loop turns."""
    thresholds, collected, idle = gc.get_threshold(), [], iter([True, False, False, True, True, False])

    async def story() -> None:
        monkeypatch.setattr(garbage, "LOOK_S", 0.0)
        looks = [0]
        gc.callbacks.append(lambda phase, of: of["generation"] == 2 and phase == "stop" and collected.append(looks[0]))

        def is_idle() -> bool:
            looks[0] += 1
            return next(idle, False)

        task = asyncio.create_task(garbage.collect_garbage(is_idle))
        while looks[0] < 6:
            await asyncio.sleep(0)
        assert collected == [4], "idle from the fourth look on, and not at first"
        monkeypatch.setattr(garbage, "EVERY_S", -1.0)
        await asyncio.sleep(0.01)
        assert collected[-1] > 6
        task.cancel()

    try:
        asyncio.run(story())
        assert gc.get_threshold()[2] == garbage.NEVER
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*thresholds)
