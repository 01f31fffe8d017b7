"""Draws tokens on a GPU: the two launches of scan.py and settle.py over a batch of rows.

Owns `draw`, which leaves its results on the device and waits for nothing, and `sample_rows`, its twin for the host.
Invariant: tokens are those of kernel_cpu.py, and a row's results depend on that row's inputs alone.
Called by sampler.py on GPUs.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton

from tailrace.deployments.vllm_exact.fused.scan import FILTERED, FLOATS, GREEDY, INTS, OPEN, scan
from tailrace.deployments.vllm_exact.fused.settle import SHAPE, settle
from tailrace.deployments.vllm_exact.gumbel_rng import GREEDY_BELOW

SPAN, BLOCK, GROUP = 16_384, 1024, 64
"""Logits per program of the first launch, per look of a program, and per group.

Fixed, since the order of a row's sums must not depend on the batch.
"""

ROOM, LEAST_ROOM = 16, 1024
"""The buffer of a row has room for one of so many of its logits: with its indexes an eighth of the row, written once."""

WINDOW = 0.125
"""As in kernel_cpu.py: margins up to this, divided by T, are measured."""

LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}  # fused operations would give other units than filters_cpu.py


class Shape(NamedTuple):
    """The sampling parameters of n rows: heat f64[n, 3], filters f64[n, 8] and plan i32[n, 3], arrays or tensors."""

    heat: np.ndarray | torch.Tensor  # 1 / T, reach of the margin as a factor, 1 if the largest logits of groups are needed
    filters: np.ndarray | torch.Tensor  # log(min_p) T and top_p, each as given, wider, narrower; tolerance; T
    plan: np.ndarray | torch.Tensor  # mode, top_k, forced token or -1

    def to(self, device) -> "Shape":
        """Returns these arrays as tensors there; the device is not waited for."""
        return Shape(*(to_device(each, device) for each in self))


def to_device(values: np.ndarray, device) -> torch.Tensor:
    held = torch.from_numpy(np.ascontiguousarray(values))
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held.to(device)


def shape_of(vocab, temperature, top_p, top_k, min_p, forced, tolerance) -> Shape:
    """Returns the Shape, in arrays, of columns as those of `kernel_cpu.sample_rows`."""
    heat = temperature.astype(np.float64)
    greedy = heat < GREEDY_BELOW  # in float64, as in kernel_cpu.py
    grouped = (top_p < 1) | ((top_k > 0) & (top_k < vocab))
    filtered = grouped | (min_p > 0)
    with np.errstate(divide="ignore", over="ignore"):
        inv_t = 1.0 / np.where(greedy, 1.0, heat)
        by = np.where(greedy, 0, tolerance / np.where(greedy, 1, temperature)).astype(np.float32)
        reach = np.exp(np.clip(tolerance * inv_t, WINDOW, 30.0))
        drops = [np.log(each.astype(np.float64)) * heat for each in (min_p, *(_moved_min_p(min_p, b) for b in (by, -by)))]
    nuclei = [top_p, *(_moved_top_p(top_p, b) for b in (by, -by))]
    columns = [*drops, *nuclei, tolerance, heat]
    mode = np.where(greedy, GREEDY.value, np.where(filtered, FILTERED.value, OPEN.value))
    return Shape(
        np.stack([inv_t, reach, grouped & ~greedy], axis=1),
        np.stack([each.astype(np.float64) for each in columns], axis=1),
        np.stack([mode, np.maximum(top_k, 0), forced], axis=1).astype(np.int32),
    )


def _moved_top_p(top_p, by):
    """Returns top_p that keeps a little more, by > 0, or less; see `filters_cpu.moved`."""
    return np.where(top_p < 1.0, np.clip(top_p + by, np.float32(1e-6), 1.0), top_p).astype(np.float32)


def _moved_min_p(min_p, by):
    return np.where(min_p > 0.0, np.minimum(min_p * np.exp(-by), 1.0), min_p).astype(np.float32)


def draw(logits, keys, positions, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (tokens i32[n], values f32[n, 3]: logprob, raw logprob, margin) on the device of the logits.

    logits [n, V] of float32, bfloat16 or float16, their rows contiguous; keys i64[n], the bits of u64; positions i64[n];
    `shape` as tensors. Nothing is read back. A forced token must be inside the vocabulary.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    values = torch.empty((rows, 3), dtype=torch.float32, device=logits.device)
    if not rows:
        return tokens, values
    parts, groups, room = -(-vocab // SPAN), -(-vocab // GROUP), max(LEAST_ROOM, vocab // ROOM)
    ints = torch.empty((rows, parts, INTS.value), dtype=torch.int32, device=logits.device)
    floats = torch.empty((rows, parts, FLOATS.value), dtype=torch.float64, device=logits.device)
    most = torch.empty((rows, groups), dtype=torch.int32, device=logits.device)
    kept = torch.empty((rows, room), dtype=logits.dtype, device=logits.device)
    kept_at = torch.empty((rows, room), dtype=torch.int32, device=logits.device)
    block = min(BLOCK, max(GROUP, triton.next_power_of_2(vocab)))
    given = logits, logits.stride(0), vocab, keys, positions, shape.heat, shape.plan
    scan[rows, parts](*given, ints, floats, most, BLOCK=block, SPAN=SPAN, GROUP=GROUP, **LAUNCH)
    settle[rows,](
        *given, shape.filters, parts, ints, floats, most, kept, kept_at, room, _rank(vocab, room), tokens, values,
        PARTS=triton.next_power_of_2(parts), GROUP=GROUP, GROUPS=triton.next_power_of_2(groups), BLOCK=block, **LAUNCH,
    )  # fmt: skip
    return tokens, values


def _rank(vocab: int, room: int) -> int:
    """Returns the rank, among the largest logits of groups, of one that about half of `room` logits are above."""
    groups = -(-vocab // GROUP)
    return groups if room >= vocab else int(groups * -np.expm1(-0.5 * room / groups))


def sample_rows(logits, keys, positions, temperature, top_p, top_k, min_p, forced, tolerance):
    """Does the same as `kernel_cpu.sample_rows` for a tensor of logits of a GPU.

    The other arguments and the results are numpy arrays on the host. Raises ValueError if a forced token is outside
    the vocabulary. One synchronisation, at the end.
    """
    rows, vocab = logits.shape
    if rows and forced.max() >= vocab:
        raise ValueError(f"forced token {forced.max()} is outside the vocabulary of {vocab}")
    shape = shape_of(vocab, temperature, top_p, top_k, min_p, forced, tolerance).to(logits.device)
    seeds, places = to_device(keys.view(np.int64), logits.device), to_device(positions, logits.device)
    tokens, values = draw(logits, seeds, places, shape)
    return tokens.cpu().numpy(), *(np.ascontiguousarray(column) for column in values.cpu().numpy().T)
