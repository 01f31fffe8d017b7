"""A long context is saved and loaded whole: many more pieces than Mooncake's transport takes at a time."""

import asyncio

import numpy as np

from benchmarks.pool.pool_testbed import running_pool
from benchmarks.pool.transport import store_client
from tailrace.kvpool.config import PoolConfig, PoolEndpoint
from tailrace.kvpool.counts import Counts
from tailrace.kvpool.store import PoolStore

BLOCKS, PIECES, PIECE_BYTES = 128, 60, 512
"""4,096 tokens of the demo model; the pieces are smaller, which changes nothing."""


def put_and_get(pool: PoolEndpoint) -> dict[str, int]:
    from mooncake.store import ReplicateConfig

    client, counts = store_client(pool), Counts()
    store = PoolStore(client, counts, retry_s=1.0)
    wrote = np.random.default_rng(0).integers(0, 256, (BLOCKS, PIECES, PIECE_BYTES), np.uint8)
    read = np.zeros_like(wrote)
    keys, sizes = [f"block-{number}" for number in range(BLOCKS)], [[PIECE_BYTES] * PIECES] * BLOCKS
    for memory in (wrote, read):
        assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    at_wrote, at_read = ([[piece.ctypes.data for piece in block] for block in memory] for memory in (wrote, read))
    assert store.batch_put_from_multi_buffers(keys, at_wrote, sizes, ReplicateConfig()) == [0] * BLOCKS
    assert store.batch_get_into_multi_buffers(keys, at_read, sizes) == [PIECES * PIECE_BYTES] * BLOCKS
    assert np.array_equal(wrote, read)
    client.close()
    return counts.take()


async def run() -> dict[str, int]:
    async with running_pool(PoolConfig(dram_gib=0.1)) as pool:
        return await asyncio.to_thread(put_and_get, pool.endpoint)


def test_a_long_context_is_saved_and_loaded_whole():
    counts = asyncio.run(run())
    assert counts["saved_bytes"] == counts["loaded_bytes"] == BLOCKS * PIECES * PIECE_BYTES
    assert not [name for name in counts if "failed" in name]
