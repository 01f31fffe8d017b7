"""Triton's kernels of one engine step, interpreted once and then replayed: a replay writes the recorded values again.

An interpreted kernel takes hundreds of times as long as the host's part of a step, and leaves the processor's caches
cold. All steps of a batch that only decodes have the same launches. The host reads only tokens from their results, and
its work does not depend on which tokens. Invariant: a launch that is not the next one of the record is interpreted,
such as the launch for a request's next block. Called by overhead_engines.py.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch

MOST_VALUES = 1 << 16
"""Maximum number of values of a recorded tensor. A replay leaves larger ones, such as logits, unchanged."""


class Launch(NamedTuple):
    """A recorded launch: its kernel, and the tensors after the launch, by place or name of the argument."""

    kernel: object
    tensors: dict[int | str, torch.Tensor]


class RecordedKernels:
    """`executor`: the class of Triton's interpreter whose calls are launches, GridExecutor. `runner`: the model runner,
    whose step begins with `execute_model`.
    """

    def __init__(self, executor: type, runner):
        self._launches: list[Launch] = []
        self._at, self._records, self._replays = 0, False, False
        inner, begin = executor.__call__, runner.execute_model

        def launch(one, *args, **kwargs):
            self._launch(inner, one, args, kwargs)

        def execute_model(*args, **kwargs):
            self._at = 0
            return begin(*args, **kwargs)

        executor.__call__, runner.execute_model = launch, execute_model

    @contextmanager
    def record(self):
        """Records the launches of the step in this block."""
        self._launches, self._records = [], True
        yield
        self._records, self._replays = False, True

    def stop(self) -> None:
        """Ends the replay: all launches are interpreted again."""
        self._replays = False

    def _launch(self, inner, executor, args: tuple, kwargs: dict) -> None:
        tensors = {name: one for name, one in [*enumerate(args), *kwargs.items()] if isinstance(one, torch.Tensor)}
        known = self._launches[self._at] if self._replays and self._at < len(self._launches) else None
        if known is not None and known.kernel is executor.fn:
            self._at += 1
            for name, value in known.tensors.items():
                tensors[name].copy_(value)
            return
        inner(executor, *args, **kwargs)
        if self._records:
            kept = {name: one.clone() for name, one in tensors.items() if one.numel() <= MOST_VALUES}
            self._launches.append(Launch(executor.fn, kept))
