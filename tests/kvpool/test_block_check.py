"""A block of KV is read as it was written under its key, or it is a miss: bits, keys, sizes, secrets, threads."""

import ctypes
import threading

import numpy as np
import pytest

from tailrace.kvpool.block_check import CHECK_BYTES, CORRUPT, BlockCheck, mac_key
from tailrace.kvpool.counts import Counts
from tailrace.kvpool.store import MAX_PIECES, PoolStore

BLOCKS, PIECES, PIECE_BYTES = 12, 6, 64
SIZES = [[PIECE_BYTES] * PIECES] * BLOCKS
KEYS = [f"block-{number}" for number in range(BLOCKS)]


class HostStore:
    """A store of this process with Mooncake's calls: it copies from and to the addresses that it is given."""

    def __init__(self):
        self.kept: dict[str, bytes] = {}
        self.registered: list[range] = []

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append(range(address, address + size))
        return 0

    def batch_put_from_multi_buffers(self, keys, addresses, sizes, config) -> list[int]:
        for key, places, lengths in zip(keys, addresses, sizes, strict=True):
            assert any(places[-1] in memory for memory in self.registered)
            self.kept[key] = b"".join(ctypes.string_at(*piece) for piece in zip(places, lengths, strict=True))
        return [0] * len(keys)

    def batch_get_into_multi_buffers(self, keys, addresses, sizes) -> list[int]:
        results = []
        for key, places, lengths in zip(keys, addresses, sizes, strict=True):
            kept = self.kept.get(key)
            if kept is None or len(kept) != sum(lengths):
                results.append(-704)
                continue
            at = 0
            for place, length in zip(places, lengths, strict=True):
                ctypes.memmove(place, kept[at : at + length], length)
                at += length
            results.append(at)
        return results

    def close(self) -> None:
        self.kept.clear()

    def batch_remove(self, keys, force) -> None:
        assert force
        for key in keys:
            del self.kept[key]


def memory(seed: int | None) -> np.ndarray:
    shape = BLOCKS, PIECES, PIECE_BYTES
    return np.zeros(shape, np.uint8) if seed is None else np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


KEPT_ALIVE: list[np.ndarray] = []


def places(block_bytes: np.ndarray) -> list[list[int]]:
    KEPT_ALIVE.append(block_bytes)  # addresses say nothing to the garbage collector
    return [[piece.ctypes.data for piece in block] for block in block_bytes]


def pool_of(raw: HostStore, key: bytes | None = None) -> tuple[PoolStore, Counts]:
    counts = Counts()
    return PoolStore(raw, counts, 1.0, lambda register: BlockCheck(register, MAX_PIECES, key)), counts


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["checksum", "mac"])
def test_blocks_come_back_as_they_were_written(key):
    (store, counts), wrote, read = pool_of(HostStore(), key), memory(1), memory(None)
    assert store.batch_put_from_multi_buffers(KEYS, places(wrote), SIZES, None) == [0] * BLOCKS
    assert store.batch_get_into_multi_buffers(KEYS, places(read), SIZES) == [PIECES * PIECE_BYTES] * BLOCKS
    assert np.array_equal(wrote, read)
    assert not [name for name in counts.take() if "failed" in name]


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["checksum", "mac"])
def test_any_flipped_bit_is_a_miss_that_is_counted_and_removed(key):
    raw = HostStore()
    (store, counts), wrote = pool_of(raw, key), memory(1)
    block_bytes = PIECES * PIECE_BYTES + CHECK_BYTES
    rng = np.random.default_rng(2)
    for bit in [0, 8 * block_bytes - 1, *rng.integers(0, 8 * block_bytes, 200)]:
        store.batch_put_from_multi_buffers(KEYS, places(wrote), SIZES, None)
        kept = bytearray(raw.kept[KEYS[5]])
        kept[bit // 8] ^= 1 << (bit % 8)
        raw.kept[KEYS[5]] = bytes(kept)
        results = store.batch_get_into_multi_buffers(KEYS, places(memory(None)), SIZES)
        assert [i for i, code in enumerate(results) if code < 0] == [5] and results[5] == CORRUPT
        assert KEYS[5] not in raw.kept
    assert counts.take()["load_failed.corrupt"] == 202


def test_the_bytes_of_another_key_are_a_miss():
    raw = HostStore()
    (store, _), wrote = pool_of(raw), memory(1)
    store.batch_put_from_multi_buffers(KEYS, places(wrote), SIZES, None)
    raw.kept[KEYS[0]], raw.kept[KEYS[1]] = raw.kept[KEYS[1]], raw.kept[KEYS[0]]
    results = store.batch_get_into_multi_buffers(KEYS, places(memory(None)), SIZES)
    assert results[:3] == [CORRUPT, CORRUPT, PIECES * PIECE_BYTES]


def test_a_missing_block_keeps_its_own_code():
    raw = HostStore()
    store, counts = pool_of(raw)
    store.batch_put_from_multi_buffers(KEYS[1:], places(memory(1))[1:], SIZES[1:], None)
    assert store.batch_get_into_multi_buffers(KEYS, places(memory(None)), SIZES)[:2] == [-704, PIECES * PIECE_BYTES]
    assert counts.take()["load_failed.gone"] == 1


def test_a_mac_of_another_secret_is_a_miss_and_a_checksum_is_no_mac():
    raw, wrote = HostStore(), memory(1)
    (first, _), (second, _), (plain, _) = (pool_of(raw, key) for key in (b"a" * 32, b"b" * 32, None))
    for writer in (second, plain):
        writer.batch_put_from_multi_buffers(KEYS, places(wrote), SIZES, None)
        assert first.batch_get_into_multi_buffers(KEYS, places(memory(None)), SIZES) == [CORRUPT] * BLOCKS


def test_threads_do_not_share_their_checks():
    raw, wrote, failures = HostStore(), memory(1), []
    store, _ = pool_of(raw)

    def reads_and_writes(name: int) -> None:
        keys = [f"{name}-{key}" for key in KEYS]
        for _ in range(100):
            store.batch_put_from_multi_buffers(keys, places(wrote), SIZES, None)
            results = store.batch_get_into_multi_buffers(keys, places(memory(None)), SIZES)
            failures.extend(code for code in results if code < 0)

    threads = [threading.Thread(target=reads_and_writes, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and len(raw.registered) == 4


def test_another_client_gets_the_memory_of_the_former_one():
    first, second, wrote, read = HostStore(), HostStore(), memory(1), memory(None)
    store, _ = pool_of(first)
    assert store.register_buffer(read.ctypes.data, read.nbytes) == 0
    store.batch_put_from_multi_buffers(KEYS, places(wrote), SIZES, None)
    store.replace(second)
    assert second.registered == first.registered and len(second.registered) == 2
    assert store.batch_get_into_multi_buffers(KEYS, places(read), SIZES) == [-704] * BLOCKS
    store.batch_put_from_multi_buffers(KEYS, places(wrote), SIZES, None)
    assert store.batch_get_into_multi_buffers(KEYS, places(read), SIZES) == [PIECES * PIECE_BYTES] * BLOCKS


def test_a_client_that_refuses_the_memory_changes_nothing():
    first, wrote = HostStore(), memory(1)
    store, _ = pool_of(first)
    store.batch_put_from_multi_buffers(KEYS, places(wrote), SIZES, None)
    second = HostStore()
    second.register_buffer = lambda address, size: -600
    with pytest.raises(RuntimeError, match="does not take the KV cache: Mooncake says -600"):
        store.replace(second)
    assert store.batch_get_into_multi_buffers(KEYS, places(memory(None)), SIZES)[0] == PIECES * PIECE_BYTES


def test_a_secret_is_read_from_a_file_and_missing_ones_are_named(tmp_path):
    file = tmp_path / "secret"
    with pytest.raises(ValueError, match=r"mac_key_file .*secret: No such file or directory; write a secret there"):
        mac_key(str(file))
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"mac_key_file .*secret: it is empty"):
        mac_key(str(file))
    file.write_text("a secret\n")
    key = mac_key(str(file))
    file.write_text("another\n")
    assert len(key) == 32 and mac_key(str(file)) != key
