"""Tests the fused draw: its tokens against kernel_cpu's, its microseconds, and the speed at which it reads logits.

Several inputs take turns, so that logits come from memory and not from the L2. Draws by torch of the same logits are
timed too. On CPUs the kernel is interpreted, and only its tokens are compared.
"""

from collections.abc import Callable, Mapping
from itertools import count

import numpy as np
import torch

from tailrace.lab.benchmarks.engine import interpreted, sampler_triton
from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.timers import GRAPH_CALLS, microseconds, seconds_of, seconds_without_launches

VOCABULARIES = (49_152, 128_256, 151_936)
ROWS = (1, 8, 64, 256, 512)
L2_BYTES = 50e6
"""Bytes of the L2 of an H100 and an H200. A speed is given only where the inputs that take turns are larger."""

TOLERANCE = 2e-4


def sampler(step: Measurements) -> None:
    kernel = _kernel() if step.place.card else interpreted.interpreted()
    try:
        step.tried("tokens of the CPU", lambda: alike(step, kernel))
        for vocabulary in step.place.of(VOCABULARIES, (512,)):
            for rows in step.place.of(ROWS, (2,)):
                case = DrawCase(step.place.device, kernel, rows, vocabulary)
                step.on_card(f"{rows} rows of {vocabulary}", case.times)
    finally:
        if not step.place.card:
            interpreted.forget()


def _kernel():
    from tailrace.deployments.vllm_exact.fused import kernel

    return kernel


class OnDevice:
    """The fused kernel, with logits moved to the device first."""

    def __init__(self, kernel, device: str):
        self._kernel, self._device = kernel, device

    def sample_rows(self, logits, **columns):
        return self._kernel.sample_rows(logits.to(self._device), **columns)


def alike(step: Measurements, kernel) -> dict:
    """Returns the differences from kernel_cpu over rows of every kind. No token should differ."""
    rng, rows, vocabulary = np.random.default_rng(0), step.place.of(512, 8), step.place.of(49_152, 200)
    logits = sampler_triton.some_logits(rng, vocabulary, rows, torch.bfloat16)
    columns = sampler_triton.some_columns(rng, vocabulary, rows)
    found = sampler_triton.differences(OnDevice(kernel, step.place.device), logits, columns)
    return {"rows": rows} | found


class DrawCase:
    """Draws of one size: fused draws with different filters, and draws by torch."""

    def __init__(self, device: str, kernel, rows: int, vocabulary: int):
        from tailrace.deployments.vllm_exact.fused.parameters import to_device

        self._device, self._rows, self._vocabulary = torch.device(device), rows, vocabulary
        turns = GRAPH_CALLS if device == "cuda" else 1
        self._logits = [(3.0 * torch.randn(rows, vocabulary, device=device)).to(torch.bfloat16) for _ in range(turns)]
        self._turn, self._kernel = count(), kernel
        self._keys, self._places = (to_device(np.arange(rows), self._device) for _ in range(2))
        kinds = {"open": {}, "t 0.7": {"t": 0.7}, "greedy": {"t": 0.0}, "top_p 0.95": {"top_p": 0.95}}
        kinds["top_k 50"] = {"top_k": 50}
        self._given = {kind: self._parameters(**given) for kind, given in kinds.items()}

    def _parameters(self, t: float = 1.0, top_p: float = 1.0, top_k: int = 0):
        from tailrace.deployments.vllm_exact.fused.parameters import parameters_of

        ones, ints = np.ones(self._rows, np.float32), np.ones(self._rows, np.int32)
        columns = ones * np.float32(t), ones * np.float32(top_p), ints * top_k, 0 * ones, -ints
        return parameters_of(self._vocabulary, *columns, ones * np.float32(TOLERANCE)).to(self._device)

    def _next(self) -> torch.Tensor:
        return self._logits[next(self._turn) % len(self._logits)]

    def _runs(self) -> dict[str, Callable]:
        draw, noise = self._kernel.draw, torch.empty(self._rows, self._vocabulary, device=self._device)
        runs = {
            kind: (lambda given=given: draw(self._next(), self._keys, self._places, given))
            for kind, given in self._given.items()
        }
        return runs | {
            "softmax, multinomial": lambda: torch.multinomial(self._next().softmax(-1, dtype=torch.float32), 1),
            "softmax, exponential": lambda: (
                self._next().softmax(-1, dtype=torch.float32).div_(noise.exponential_()).argmax(-1)
            ),
            "argmax": lambda: self._next().argmax(-1),
        }

    def times(self) -> dict:
        """Returns microseconds with and without the host's launches, and TB/s of logits that come from memory."""
        runs = self._runs()
        launched = {kind: microseconds(seconds_of(run)) for kind, run in runs.items()}
        alone = {kind: seconds_without_launches(run) for kind, run in runs.items()}
        return {
            "us": launched,
            "us_without_launches": {kind: microseconds(seconds) for kind, seconds in alone.items()},
            "tb_s": speeds(2 * self._vocabulary * self._rows, alone),
        }


def speeds(size_bytes: int, seconds: Mapping[str, float]) -> dict[str, float] | None:
    """Returns TB/s by the seconds of calls that read `size_bytes`; None if their inputs fit into the L2."""
    if GRAPH_CALLS * size_bytes <= L2_BYTES:
        return None
    return {kind: round(1e-12 * size_bytes / one, 3) for kind, one in seconds.items()}
