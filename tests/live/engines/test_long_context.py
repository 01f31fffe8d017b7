"""A long context is saved and loaded whole: many more pieces than Mooncake's transport takes at a time."""

import asyncio

import numpy as np
import pytest

from tailrace.kvpool.block_check import CORRUPT, BlockCheck
from tailrace.kvpool.counts import Counts
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint
from tailrace.kvpool.store import MAX_PIECES, PoolStore
from tailrace.lab.benchmarks.pool.pool_testbed import running_pool
from tailrace.lab.benchmarks.pool.transport import store_client

BLOCKS, PIECES, PIECE_BYTES = 128, 60, 512
"""4,096 tokens of the demo model; the pieces are smaller, which changes nothing."""


def put_and_get(pool: PoolEndpoint, key: bytes | None) -> dict[str, int]:
    from mooncake.store import ReplicateConfig

    client, counts = store_client(pool), Counts()
    store = PoolStore(client, counts, retry_s=1.0, check=lambda register: BlockCheck(register, MAX_PIECES, key))
    wrote = np.random.default_rng(0).integers(0, 256, (BLOCKS, PIECES, PIECE_BYTES), np.uint8)
    read = np.zeros_like(wrote)
    keys, sizes = [f"block-{number}" for number in range(BLOCKS)], [[PIECE_BYTES] * PIECES] * BLOCKS
    for memory in (wrote, read):
        assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    at_wrote, at_read = ([[piece.ctypes.data for piece in block] for block in memory] for memory in (wrote, read))
    assert store.batch_put_from_multi_buffers(keys, at_wrote, sizes, ReplicateConfig()) == [0] * BLOCKS
    assert store.batch_get_into_multi_buffers(keys, at_read, sizes) == [PIECES * PIECE_BYTES] * BLOCKS
    assert np.array_equal(wrote, read)
    seen = counts.take()
    assert not [name for name in seen if "failed" in name]
    flip_a_bit(client, keys[7])
    results = store.batch_get_into_multi_buffers(keys, at_read, sizes)
    assert [number for number, code in enumerate(results) if code == CORRUPT] == [7]
    assert store.batch_is_exist(keys[6:8]) == [1, 0]
    client.close()
    return seen


def flip_a_bit(client, key: str) -> None:
    """As whichever host reaches the pool's ports can, and as bad memory does."""
    kept = bytearray(client.get(key))
    kept[len(kept) // 2] ^= 1
    assert client.remove(key, force=True) == 0
    assert client.put(key, bytes(kept)) == 0


async def run(key: bytes | None) -> dict[str, int]:
    async with running_pool(PoolConfig(dram_gib=0.1)) as pool:
        return await asyncio.to_thread(put_and_get, pool.endpoint, key)


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["checksum", "mac"])
def test_a_long_context_is_saved_and_loaded_whole_and_a_flipped_bit_is_a_miss(key):
    counts = asyncio.run(run(key))
    assert counts["saved_bytes"] == counts["loaded_bytes"] == BLOCKS * PIECES * PIECE_BYTES
