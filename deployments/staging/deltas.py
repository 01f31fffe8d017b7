"""Deltas of weights: what differs from a base that the receiver holds, too, compressed.

A delta is the XOR with the base's bytes at the same place, as one zstd frame. A step of reinforcement learning changes
few bfloat16 weights (PULSE, arXiv 2602.03839: about 1 %). Invariant: a delta does not name its base. Both ends agree on
it by version and digest before, and compare the checksum of the result after.
"""

import numpy as np

LEVEL = 1
"""zstd's fastest level: 0.4 to 0.9 GB/s on a core for bfloat16. Higher ones save little of what is mostly zeros."""

WINDOW_BYTES = 32 << 20
"""Maximum bytes that one delta gives: both ends hold them in memory."""


def delta_of(base: bytes | memoryview, data: bytes | memoryview) -> bytes:
    """Returns the delta of `data` on equally many bytes of a base."""
    from zstandard import ZstdCompressor  # absent from the light installation, as below

    return ZstdCompressor(level=LEVEL).compress(_flips(base, data))


def bytes_given(delta: bytes) -> int:
    """Returns how many bytes a delta gives. Raises ValueError, one line, if it is none, or is too large."""
    from zstandard import ZstdError, frame_content_size

    try:
        size = frame_content_size(delta)
    except ZstdError as error:
        raise ValueError(f"not a delta: {error}") from error
    if not 0 < size <= WINDOW_BYTES:
        raise ValueError(f"not a delta of 1 to {WINDOW_BYTES:,} bytes: {size:,}")
    return size


def applied(base: bytes | memoryview, delta: bytes) -> memoryview:
    """Returns the bytes that a delta gives on a base of equal size. Raises ValueError, one line."""
    from zstandard import ZstdDecompressor, ZstdError

    if bytes_given(delta) != len(base):
        raise ValueError(f"a delta of {bytes_given(delta):,} bytes, for a base of {len(base):,}")
    try:
        flips = ZstdDecompressor().decompress(delta, allow_extra_data=False)
    except ZstdError as error:
        raise ValueError(f"not a delta: {error}") from error
    return memoryview(_flips(base, flips))


def _flips(one: bytes | memoryview, other: bytes | memoryview) -> np.ndarray:
    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
