"""Freed memory of this process, kept for the next pass.

glibc maps each large tensor afresh and gives it back when it is freed, so the kernel would clear the same gigabytes
for every pass.
"""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Constants of glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Keeps freed memory. Call it before the first threads that compute. Returns False with another C library than
    glibc.

    The process keeps the maximum memory that it has used.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(*option) for option in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)))
