"""The thread of an asynchronous trainer's worker: whatever ends it, the trainer is told."""

import asyncio
import queue
from types import SimpleNamespace

import pytest

from tailrace.app.errors import Failed
from tailrace.app.trl.async_worker import AsyncWorker

SETTINGS = {
    "token_budget": 0, "max_inflight_tasks": -1, "queue_maxsize": 0, "num_generations": 2, "world_size": 1,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "weight_sync_steps": 1, "max_staleness": 0,
}  # fmt: skip


@pytest.mark.parametrize("error", [ValueError("no answer"), asyncio.CancelledError(), SystemExit(3)])
def test_a_reward_function_that_raises_cancels_itself_or_exits_ends_training_with_the_reason(error):
    async def make(number, row, version_of):
        raise error

    weights = SimpleNamespace(version=1)
    worker = AsyncWorker(make, weights, args=SimpleNamespace(**SETTINGS), train_dataset=[{}], first_group=0)
    worker.start()
    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get(timeout=2)
    with pytest.raises(Failed, match=type(error).__name__):
        worker.check_health(stale_after_s=60.0)
    worker.stop()
