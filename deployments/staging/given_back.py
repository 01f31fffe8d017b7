"""Memory of host tensors that is given back to the system while their content is not needed.

Invariant: addresses stay valid, so every view of a tensor does; its content is lost, and reads as zeros until it is
written again. Only whole pages of a tensor's own storage are given back. Called by the worker of a sleeping engine.
"""

import ctypes
import os
from collections.abc import Iterable

import torch

MADV_DONTNEED = 4
"""Linux's advice that drops pages of private memory at once."""


def give_back(tensors: Iterable[torch.Tensor]) -> int:
    """Gives back the memory of tensors. Returns the number of bytes. Raises OSError."""
    libc, page, given = ctypes.CDLL(None, use_errno=True), os.sysconf("SC_PAGE_SIZE"), 0
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors if one.numel()}
    for start, storage in storages.items():
        first, end = -(-start // page) * page, (start + storage.nbytes()) // page * page
        if end <= first:
            continue
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        given += end - first
    return given


def trim() -> None:
    """Gives freed memory back, which the C library would keep for later."""
    ctypes.CDLL(None).malloc_trim(0)
