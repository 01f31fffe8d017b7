"""Sampling parameters of rows in the form of the fused kernel, computed once on the host.

Invariant: they depend on the requests alone, not on tokens or positions, so a batch's are kept while it is unchanged.
Called by kernel.py and device_sampler.py.
"""

from typing import NamedTuple

import numpy as np
import torch

from tailrace.deployments.vllm_exact.fused.scan import FILTERED, GREEDY, OPEN
from tailrace.deployments.vllm_exact.gumbel_rng import GREEDY_BELOW

WINDOW = 0.125
"""Maximum margin, divided by T, that is measured; as in kernel_cpu.py."""


BINS_PER_T = 8
"""Bins of counts per logit at temperature 1. Below 0.5 they become no finer, so that 256 reach 16 logits down."""


class RowParameters(NamedTuple):
    """The sampling parameters of n rows: heat f64[n, 3], filters f64[n, 8] and plan i32[n, 3], arrays or tensors."""

    heat: np.ndarray | torch.Tensor  # 1 / T, the margin's reach as a factor, bins per logit (0: no counts)
    filters: np.ndarray | torch.Tensor  # log(min_p) T and top_p, each as given, wider, narrower; tolerance; T
    plan: np.ndarray | torch.Tensor  # mode, top_k, forced token or -1

    def to(self, device) -> "RowParameters":
        """Returns these arrays as tensors there; the device is not waited for."""
        return RowParameters(*(to_device(each, device) for each in self))


def to_device(values: np.ndarray, device) -> torch.Tensor:
    held = torch.from_numpy(np.ascontiguousarray(values))
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held.to(device)


def parameters_of(vocab, temperature, top_p, top_k, min_p, forced, tolerance) -> RowParameters:
    """Converts columns as those of `kernel_cpu.sample_rows` to RowParameters, in arrays."""
    heat = temperature.astype(np.float64)
    greedy = heat < GREEDY_BELOW  # in float64, as in kernel_cpu.py
    grouped = (top_p < 1) | ((top_k > 0) & (top_k < vocab))
    filtered = grouped | (min_p > 0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inv_t = 1.0 / np.where(greedy, 1.0, heat)
        by = np.where(greedy, 0, tolerance / np.where(greedy, 1, temperature)).astype(np.float32)
        reach = np.exp(np.clip(tolerance * inv_t, WINDOW, 30.0))
        drops = [
            np.log(each.astype(np.float64)) * heat for each in (min_p, *(_moved_min_p(min_p, b) for b in (by, -by)))
        ]
    nuclei = [top_p, *(_moved_top_p(top_p, b) for b in (by, -by))]
    columns = [*drops, *nuclei, tolerance, heat]
    mode = np.where(greedy, GREEDY.value, np.where(filtered, FILTERED.value, OPEN.value))
    return RowParameters(
        np.stack([inv_t, reach, np.where(grouped & ~greedy, BINS_PER_T / np.maximum(heat, 0.5), 0.0)], axis=1),
        np.stack([each.astype(np.float64) for each in columns], axis=1),
        np.stack([mode, np.maximum(top_k, 0), forced], axis=1).astype(np.int32),
    )


def _moved_top_p(top_p, by):
    """Returns top_p that keeps a little more, by > 0, or less; see `filters_cpu.moved`."""
    return np.where(top_p < 1.0, np.clip(top_p + by, np.float32(1e-6), 1.0), top_p).astype(np.float32)


def _moved_min_p(min_p, by):
    return np.where(min_p > 0.0, np.minimum(min_p * np.exp(-by), 1.0), min_p).astype(np.float32)
