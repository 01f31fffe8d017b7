"""The fused sampling kernel under Triton's interpreter, which needs no GPU, and the bytes that the kernel moves.

Invariant: the kernel is the one of GPUs, operation by operation, in numpy. Only calls of its helper functions are made
cheaper: for each of them the interpreter would prepare the language again, which takes a millisecond.
Called by sampler_triton.py and by tests.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import numpy as np

ROOM = "tailrace.deployments.vllm_exact.fused"
REPLACED: list[tuple] = []  # (module, name, function) of Triton's own library


def interpreted():
    """Returns the module kernel.py of the fused kernel with interpreted functions.

    Raises RuntimeError if the process has loaded the compiled kernel before: the kind that is loaded first stays.
    """
    kept = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads the variable where a function is defined
    try:
        kernel = import_module(f"{ROOM}.kernel")
        from triton.experimental import gluon  # noqa: F401 - a launch imports this module, which reads the variable too
        from triton.runtime import interpreter
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if kept is not None:
            os.environ["TRITON_INTERPRET"] = kept
    if not isinstance(kernel.scan, interpreter.InterpretedFunction):
        raise RuntimeError("the kernel is compiled in this process already")
    _interpret_library(interpreter)
    _prepare_once(interpreter)
    return kernel


def forget() -> None:
    """Removes the loaded kernel, so that the next import may be of the other kind, and restores Triton's library."""
    for name in [name for name in sys.modules if name.startswith(ROOM)]:
        del sys.modules[name]
    while REPLACED:
        setattr(*REPLACED.pop())


def _interpret_library(interpreter) -> None:
    """Replaces compiled functions of Triton's library, such as `tl.sum`, by interpreted ones.

    The library has compiled functions if Triton was imported before the variable was set.
    """
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    for module in (tl.standard, tl):
        for name, each in list(vars(module).items()):
            if isinstance(each, JITFunction):
                REPLACED.append((module, name, each))
                same = getattr(tl.standard, name, None)
                new = interpreter.InterpretedFunction(each.fn) if isinstance(same, JITFunction) else same
                setattr(module, name, new)


def _prepare_once(interpreter) -> None:
    """Makes calls of helpers inside a running kernel use the language as prepared by the kernel's own call."""
    if interpreter.InterpretedFunction.__call__.__module__ == __name__:
        return
    whole, prepared = interpreter.InterpretedFunction.__call__, set()

    def call(self, *args, **given):
        module = self.fn.__module__
        if module.startswith(ROOM) or module in prepared:
            return self.rewrite()(*args, **given)
        prepared.add(module)
        return whole(self, *args, **given)

    interpreter.InterpretedFunction.__call__ = call


class MemoryTraffic:
    """Bytes that a kernel loads and stores.

    The attribute `logits` has the bytes of all loads from the tensor `logits`. `moved` has the other bytes: each counts
    once if it is loaded, and once if it is stored.
    """

    def __init__(self, logits):
        self._begin, self._end = logits.data_ptr(), logits.data_ptr() + logits.nbytes
        self.logits = 0
        self._loaded, self._stored = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]

    def load(self, places, mask, size: int) -> None:
        places = np.broadcast_to(places, mask.shape)[mask]
        inside = (places >= self._begin) & (places < self._end)
        self.logits += int(inside.sum()) * size
        self._loaded.append(_bytes(places[~inside], size))

    def store(self, places, mask, size: int) -> None:
        self._stored.append(_bytes(np.broadcast_to(places, mask.shape)[mask], size))

    @property
    def moved(self) -> int:
        return sum(len(np.unique(np.concatenate(each))) for each in (self._loaded, self._stored))

    @property
    def on_chip(self) -> int:
        """Bytes outside the logits that were loaded again."""
        loaded = np.concatenate(self._loaded)
        return len(loaded) - len(np.unique(loaded))


def _bytes(places, size: int):
    return (places.reshape(-1, 1).astype(np.uint64) + np.arange(size, dtype=np.uint64)).ravel()


@contextmanager
def counted(logits) -> Iterator[MemoryTraffic]:
    """Yields a MemoryTraffic that counts the loads and stores of interpreted kernels in this block. `logits`: the
    tensor that the kernels read.
    """
    from triton.runtime.interpreter import _get_np_dtype
    from triton.runtime.interpreter import interpreter_builder as builder

    traffic, load, store = MemoryTraffic(logits), builder.create_masked_load, builder.create_masked_store

    def counted_load(places, mask, *rest):
        traffic.load(places.data, mask.data, _get_np_dtype(places.get_element_ty()).itemsize)
        return load(places, mask, *rest)

    def counted_store(places, value, mask, *rest):
        traffic.store(places.data, mask.data, _get_np_dtype(places.get_element_ty()).itemsize)
        return store(places, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        yield traffic
    finally:
        del builder.create_masked_load, builder.create_masked_store
