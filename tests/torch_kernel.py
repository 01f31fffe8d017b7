"""A sampling kernel in torch, on any device, in batched float64 tensor operations: a reference for the others.

Invariant: the noise integers and the filters are those of kernel_cpu.py, so the same logits give the same tokens.
Tests compare the product's kernels with it, on GPUs too.
"""

import numpy as np
import torch

from tailrace.deployments.vllm_exact.filters_torch import floors
from tailrace.deployments.vllm_exact.gumbel_rng import (
    GAMMA,
    GREEDY_BELOW,
    MASK_64,
    MIX_1,
    MIX_2,
    UNIFORM_SHIFT,
    UNIFORM_STEP,
)

ELEMENTS_AT_ONCE = 1 << 24  # bounds the float64 temporaries to about 1 GiB


def _signed(value: int) -> int:
    """Returns the int64 with these 64 bits: torch computes int64 modulo 2**64, but lacks many uint64 operations."""
    return value - (1 << 64) if value >> 63 else value


def _shift(z, bits):
    """Applies a logical right shift to int64."""
    return (z >> bits) & (MASK_64 >> bits)


def _finalise(z):
    z = (z ^ _shift(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(MIX_2)
    return z ^ _shift(z, 31)


def _outputs(seeds, indexes):
    return _finalise(seeds + (indexes + 1) * _signed(GAMMA))


def hashes(keys, positions, vocab):
    """Returns i64[n, vocab]: the hashed bits of every vocabulary index for int64 keys [n] at positions [n]."""
    seeds = _outputs(keys, positions)
    return _outputs(seeds[:, None], torch.arange(vocab, device=keys.device)[None, :])


def exponentials(keys, positions, vocab):
    """Returns f64[n, vocab]: unit exponential noise, -log(u)."""
    bits = _shift(hashes(keys, positions, vocab), UNIFORM_SHIFT)
    return -torch.log((bits.to(torch.float64) + 0.5) * UNIFORM_STEP)


def _moved(top_p, top_k, min_p, by):
    """Returns the filters that keep a little more (by > 0) or less; see `filters_cpu.moved`."""
    wider = (top_p + by).clamp(1e-6, 1.0)
    return (
        torch.where(top_p < 1.0, wider, top_p),
        top_k,
        torch.where(min_p > 0, (min_p * (-by).exp()).clamp(max=1), 0.0),
    )


def _margins(race, token, logits, peak, heat, floor, filters, tolerance):
    """Returns f64[n, 1]: the margins of kernel_cpu.py, at any distance. race f64[n, V]: the scores of all tokens.

    floor f32[n, 1]: of the `filters`, which are None or (top_p, top_k, min_p).
    """
    wide, may_drop, best = floor, torch.zeros_like(token, dtype=torch.bool), race.gather(1, token)
    if filters is not None:
        ordered, by = logits.sort(dim=1, descending=True).values, tolerance / heat
        wide = floors(logits, ordered, peak, heat, *_moved(*filters, by)) - tolerance
        tight = floors(logits, ordered, peak, heat, *_moved(*filters, -by)) + tolerance
        own = logits.gather(1, token)
        weights = torch.exp((logits.double() - peak.double()) / heat)
        mass = torch.where(logits >= floor, weights, 0.0).sum(dim=1, keepdim=True)
        inside = torch.where((logits > floor) & (logits <= own - tolerance), weights, 0.0).sum(dim=1, keepdim=True)
        inside = inside + weights.gather(1, token) > 2.0 * by * mass / filters[0]
        certain = (own > floor + 2.0 * tolerance) & ((filters[0] >= 1.0) | inside)
        may_drop = ~certain & (own < tight) & torch.isfinite(floor)
    others = torch.where(logits >= wide, race, torch.inf).scatter(1, token, torch.inf)
    margin = (others.amin(dim=1, keepdim=True) / best).log().clamp(min=0.0) * heat
    return torch.where(may_drop, 0.0, margin)


def _draw(logits, noise, temperature, filters, forced, tolerance):
    """Returns f64[4, n]: tokens, both logprobs, margins. Columns per row are [n, 1].

    filters: None or (top_p, top_k, min_p).
    """
    greedy = temperature < GREEDY_BELOW
    heat = torch.where(greedy, 1.0, temperature).double()
    peak, top = logits.max(dim=1, keepdim=True)
    below_peak = logits.double() - peak.double()
    weights = torch.exp(below_peak * (1.0 / heat))
    open_floor = torch.full_like(peak, -torch.inf)
    floor = open_floor
    if filters is not None:
        floor = floors(logits, logits.sort(dim=1, descending=True).values, peak, heat, *filters)
    race = torch.where(logits > -torch.inf, noise / weights, torch.inf)
    kept = torch.where(logits >= floor, race, torch.inf)
    token = torch.where(greedy, top, kept.argmin(dim=1, keepdim=True))
    margin = _margins(race, token, logits, peak, heat, floor, filters, tolerance)
    gap = -below_peak.scatter(1, token, -torch.inf).amax(dim=1, keepdim=True)
    margin = torch.where(forced >= 0, torch.inf, torch.where(greedy, gap, margin))
    token = torch.where(forced >= 0, forced, token)
    floor = torch.where(logits.gather(1, token) >= floor, floor, open_floor)
    mass = torch.where(logits >= floor, weights, 0.0).sum(dim=1, keepdim=True)
    drop = below_peak.gather(1, token)
    raw = drop - torch.exp(below_peak).sum(dim=1, keepdim=True).log()
    logprob = torch.where(greedy, torch.where((forced >= 0) | raw.isnan(), raw, 0.0), drop * (1.0 / heat) - mass.log())
    return torch.cat([token.double(), logprob, raw, margin], dim=1).T


def sample_rows(logits, keys, positions, temperature, top_p, top_k, min_p, forced, tolerance):
    """Does the same as `kernel_cpu.sample_rows` for a tensor of logits on any device.

    The other arguments and the results are numpy arrays on the host.
    Raises ValueError if a forced token is outside the vocabulary.
    """
    rows, vocab = logits.shape
    if rows and forced.max() >= vocab:
        raise ValueError(f"forced token {forced.max()} is outside the vocabulary of {vocab}")

    def column(values):
        return torch.from_numpy(np.ascontiguousarray(values)).to(logits.device, non_blocking=True)[:, None]

    filtered = bool((min_p > 0).any() or (top_p < 1).any() or ((top_k > 0) & (top_k < vocab)).any())
    seeds, places = column(keys.view(np.int64)), column(positions)
    heat, forced, slack = column(temperature), column(forced.astype(np.int64)), column(tolerance)
    filters = [column(top_p), column(top_k), column(min_p)] if filtered else None
    drawn, at_once = [], max(1, ELEMENTS_AT_ONCE // vocab)
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        noise = exponentials(seeds[part, 0], places[part, 0], vocab)
        some = None if filters is None else [f[part] for f in filters]
        drawn.append(_draw(logits[part].float(), noise, heat[part], some, forced[part], slack[part]))
    tokens, *values = torch.cat(drawn, dim=1).cpu().numpy() if drawn else np.empty((4, 0))
    return tokens.astype(np.int32), *(each.astype(np.float32) for each in values)
