"""A check on every KV block of the pool: a checksum, or a MAC, of its key and its bytes.

Invariant: a block is read as it was written under exactly this key, or it is a miss. Mooncake's transport checks
nothing, and its ports accept writes from any host that reaches them. The check is one more piece of the block, written
and read with it. BLAKE3 computes both kinds: 5 GB/s on one core, while the transport moves 0.4. Called by `PoolStore`.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

CHECK_BYTES = 16
"""Bytes of a check, of BLAKE3's 32: 128 bits are enough for a MAC, and a small model's block has 60 KiB."""

CORRUPT = -9998
"""Our code for a block whose check fails; Mooncake's codes are above it."""

KEY_CONTEXT = "tailrace 2026-11 check of KV blocks"
"""BLAKE3's name for this use of the secret, so that the key derived from it is of no use elsewhere."""

Register = Callable[[int, int], int]
"""Mooncake's `register_buffer`: address and bytes; 0 or a code."""

Pieces = Sequence[Sequence[int]]
Read = Callable[[Sequence[int], Sequence[int]], list]
"""Returns a buffer for each (address, bytes)."""


def mac_key(file: str) -> bytes:
    """Returns the key of 32 bytes from the secret in a file. Raises ValueError, one line, without a secret there."""
    try:
        secret = Path(file).expanduser().read_bytes().strip()
    except OSError as error:
        raise ValueError(f"mac_key_file {file}: {error.strerror}; write a secret there on every node") from error
    if not secret:
        raise ValueError(f"mac_key_file {file}: it is empty; write a secret there on every node")
    return blake3(secret, derive_key_context=KEY_CONTEXT).digest()


def host_bytes(addresses: Sequence[int], sizes: Sequence[int]) -> list:
    """Returns views of host memory."""
    memory = ((ctypes.c_ubyte * size).from_address(address) for address, size in zip(addresses, sizes, strict=True))
    return [memoryview(piece).cast("B") for piece in memory]


class DeviceBytes:
    """Copies a GPU's memory to the host, all pieces of a call in one copy, on a stream that waits for no engine
    step.
    """

    def __init__(self):
        import torch

        self._torch, self._stream = torch, torch.cuda.Stream()

    def __call__(self, addresses: Sequence[int], sizes: Sequence[int]) -> list:
        torch = self._torch
        with torch.cuda.stream(self._stream):
            pieces = [torch.as_tensor(_Piece(*piece), device="cuda") for piece in zip(addresses, sizes, strict=True)]
            copied = torch.cat(pieces).cpu().numpy()
        return np.split(copied, np.cumsum(sizes)[:-1])


class _Piece:
    """GPU memory at an address, in the form that torch takes without a copy."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class BlockCheck:
    """`register`: registers the memory of the checks. `key`: key of a MAC, or None for a checksum.

    Each calling thread has room for `max_blocks` checks: the blocks of one call.
    """

    def __init__(self, register: Register, max_blocks: int, key: bytes | None = None, read: Read = host_bytes):
        self._register, self._max_blocks, self._key, self._read = register, max_blocks, key, read
        self._own = threading.local()

    def sealed(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> tuple[Pieces, Pieces]:
        """Returns addresses and sizes for a write: each block has its check as one more piece."""
        self._places()[: len(keys)] = self._checks(keys, addresses, sizes)
        return self.opened(keys, addresses, sizes)

    def opened(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> tuple[Pieces, Pieces]:
        """Returns addresses and sizes for a read."""
        first = self._places().ctypes.data
        places = [[*block, first + CHECK_BYTES * i] for i, block in enumerate(addresses)]
        return places, [[*block, CHECK_BYTES] for block in sizes]

    def judged(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, results: Sequence[int]) -> list[int]:
        """Returns the results of a read of `opened`: bytes without the check, or CORRUPT for a block that differs."""
        there = [i for i, code in enumerate(results) if code >= 0]
        found = self._checks([keys[i] for i in there], [addresses[i] for i in there], [sizes[i] for i in there])
        right = (found == self._places()[there]).all(axis=1)
        judged = list(results)
        for i, same in zip(there, right, strict=True):
            judged[i] = results[i] - CHECK_BYTES if same else CORRUPT
        return judged

    def _places(self) -> np.ndarray:
        """Returns the checks of the blocks of this thread's call [blocks, CHECK_BYTES], in memory that Mooncake may
        use.
        """
        if not hasattr(self._own, "places"):
            places = np.zeros((self._max_blocks, CHECK_BYTES), np.uint8)
            if (code := self._register(places.ctypes.data, places.nbytes)) != 0:
                raise RuntimeError(f"no memory for the checks of KV blocks: Mooncake says {code}")
            self._own.places = places
        return self._own.places

    def _checks(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> np.ndarray:
        """Returns the checks [blocks, CHECK_BYTES] of blocks in memory."""
        checks = np.empty((len(keys), CHECK_BYTES), np.uint8)
        if not keys:
            return checks
        pieces = iter(self._read([a for block in addresses for a in block], [s for block in sizes for s in block]))
        for i, key in enumerate(keys):
            check = blake3(key.encode(), key=self._key) if self._key else blake3(key.encode())
            for _ in addresses[i]:
                check.update(next(pieces))
            checks[i] = np.frombuffer(check.digest(CHECK_BYTES), np.uint8)
        return checks
