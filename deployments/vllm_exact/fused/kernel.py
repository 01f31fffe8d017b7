"""Draws tokens on a GPU: the two launches of scan.py and settle.py over a batch of rows.

Owns `draw`, which leaves its results on the device and waits for nothing, and `sample_rows`, its twin for the host.
Invariant: tokens are those of kernel_cpu.py, and a row's results depend on that row's inputs alone.
Called by sampler.py on GPUs.
"""

import numpy as np
import torch
import triton

from tailrace.deployments.vllm_exact.fused.parameters import RowParameters, parameters_of, to_device
from tailrace.deployments.vllm_exact.fused.scan import BINS, FLOATS, INTS, scan
from tailrace.deployments.vllm_exact.fused.settle import settle

SPAN, BLOCK, LEAST_BLOCK = 16_384, 1024, 64
"""Logits per program of the first launch, and per look of a program.

Fixed, since the order of a row's sums must not depend on the batch.
"""

ROOM, LEAST_ROOM = 16, 1024
"""The buffer of a row has room for one in ROOM of its logits: with the indexes, an eighth of the bytes of the row."""

LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}  # fused operations would give other units than filters_cpu.py


def draw(
    logits, keys, positions, parameters: RowParameters, dtype: torch.dtype = torch.int32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (tokens [n] of `dtype`, values f32[n, 3]: logprob, raw logprob, margin) on the device of the logits.

    logits [n, V] of float32, bfloat16 or float16, their rows contiguous; keys i64[n], the bits of u64;
    positions i64[n]; `parameters` as tensors. Nothing is read back. A forced token must be inside the vocabulary.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=dtype, device=logits.device)
    values = torch.empty((rows, 3), dtype=torch.float32, device=logits.device)
    if not rows:
        return tokens, values
    parts, room = -(-vocab // SPAN), max(LEAST_ROOM, vocab // ROOM)
    ints = torch.empty((rows, parts, INTS.value), dtype=torch.int32, device=logits.device)
    floats = torch.empty((rows, parts, FLOATS.value), dtype=torch.float64, device=logits.device)
    counts = torch.empty((rows, parts, BINS.value), dtype=torch.int32, device=logits.device)
    kept = torch.empty((rows, room), dtype=logits.dtype, device=logits.device)
    kept_at = torch.empty((rows, room), dtype=torch.int32, device=logits.device)
    block = min(BLOCK, max(LEAST_BLOCK, triton.next_power_of_2(vocab)))
    given = logits, logits.stride(0), vocab, keys, positions, parameters.heat, parameters.plan
    scan[rows, parts](*given, ints, floats, counts, BLOCK=block, SPAN=SPAN, **LAUNCH)
    settle[rows,](
        *given, parameters.filters, parts, ints, floats, counts, kept, kept_at, room, tokens, values,
        PARTS=triton.next_power_of_2(parts), BLOCK=block, **LAUNCH,
    )  # fmt: skip
    return tokens, values


def sample_rows(logits, keys, positions, temperature, top_p, top_k, min_p, forced, tolerance):
    """Does the same as `kernel_cpu.sample_rows` for a tensor of logits of a GPU.

    The other arguments and the results are numpy arrays on the host. Raises ValueError if a forced token is outside
    the vocabulary. One synchronisation, at the end.
    """
    rows, vocab = logits.shape
    if rows and forced.max() >= vocab:
        raise ValueError(f"forced token {forced.max()} is outside the vocabulary of {vocab}")
    parameters = parameters_of(vocab, temperature, top_p, top_k, min_p, forced, tolerance).to(logits.device)
    seeds, places = to_device(keys.view(np.int64), logits.device), to_device(positions, logits.device)
    tokens, values = draw(logits, seeds, places, parameters)
    return tokens.cpu().numpy(), *(np.ascontiguousarray(column) for column in values.cpu().numpy().T)
