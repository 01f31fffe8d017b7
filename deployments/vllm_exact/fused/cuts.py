"""Floors of filters in Triton: the smallest logit that min_p, then top_k, then top_p keep.

The candidates of a row are in its buffer, or are the row itself if they do not fit. A floor is found on the ordered
integers of float32: each look at the candidates weighs PIVOTS places between a known lower and upper one.
Invariant: units are the integers of filters_cpu.py, so no order of summation changes a floor. Called by settle.py.
"""

import triton
import triton.language as tl

from tailrace.deployments.vllm_exact.fused.noise import LOWEST, order, units, value

PIVOTS = tl.constexpr(16)
CUT_BLOCK = tl.constexpr(512)


@triton.jit
def piece(source, begin, BLOCK: tl.constexpr):
    """Returns (x f32, index i32, here bool) of the candidates from `begin`; x is -inf where there is none."""
    row, kept, kept_at, packed, own, _ = source  # either `packed` or `own` is 0
    offsets = begin + tl.arange(0, BLOCK)
    held = offsets < packed
    x = tl.load(kept + offsets, held, other=-float("inf")).to(tl.float32)
    y = tl.load(row + offsets, offsets < own, other=-float("inf")).to(tl.float32)
    index = tl.where(held, tl.load(kept_at + offsets, held, other=0), offsets)
    return tl.where(held, x, y), index, offsets < packed + own


@triton.jit
def _units(x, peak, floor, inv_t, by_mass):
    if by_mass:  # noqa: SIM108 - an expression's condition must be known to the compiler
        found = units(x, peak, floor, inv_t)
    else:
        found = ((x >= floor) & (x > -float("inf"))).to(tl.int64)
    return found


@triton.jit
def total(source, peak, floor, inv_t, by_mass):
    """Returns i64: the units of the candidates from the floor on, or their number."""
    found = tl.full((), 0, tl.int64)
    for begin in range(0, source[3] + source[4], CUT_BLOCK):
        x, _, here = piece(source, begin, CUT_BLOCK)
        found += tl.sum(tl.where(here, _units(x, peak, floor, inv_t, by_mass), 0), 0)
    return found


@triton.jit
def cut(source, peak, floor, inv_t, by_mass, target):
    """Returns f32: the smallest candidate with fewer units strictly above it than target; 1 <= target <= their sum."""
    lo = tl.maximum(order(source[5]), LOWEST).to(tl.int64) - 1
    hi = order(peak).to(tl.int64)
    while hi - lo > 1:
        step = (hi - lo + PIVOTS - 1) // PIVOTS
        pivots = tl.minimum(lo + step * (1 + tl.arange(0, PIVOTS)), hi)
        above = tl.full((PIVOTS,), 0, tl.int64)
        for begin in range(0, source[3] + source[4], CUT_BLOCK):
            x, _, here = piece(source, begin, CUT_BLOCK)
            own = tl.where(here, _units(x, peak, floor, inv_t, by_mass), 0)
            is_above = order(x).to(tl.int64)[:, None] > pivots[None, :]
            above += tl.sum(tl.where(is_above, own[:, None], 0), 0)
        reached = tl.sum((above >= target).to(tl.int64), 0)
        lo, hi = tl.minimum(lo + step * reached, hi), tl.minimum(lo + step * (reached + 1), hi)
    return value(hi.to(tl.int32))


@triton.jit
def bar_of(peak, drop):
    """Returns f32: the smallest number that is at least peak + drop (f64); -inf if that is."""
    bar = peak.to(tl.float64) + drop
    floor = bar.to(tl.float32)
    return tl.where(floor.to(tl.float64) < bar, value(order(floor) + 1), floor)


@triton.jit
def floor_of(source, peak, inv_t, drop, top_k, vocab, top_p, mass_units):
    """Returns f32: the floor of one row. `drop` f64: log(min_p) * T. `mass_units`: of the row from min_p's bar on."""
    floor = bar_of(peak, drop)
    limits = (top_k > 0) & (top_k < vocab)
    if limits:  # noqa: SIM102 - the sum is made only where it is needed
        if total(source, peak, floor, inv_t, False) > top_k:
            floor = tl.maximum(floor, cut(source, peak, floor, inv_t, False, top_k.to(tl.int64)))
    if top_p < 1.0:
        if limits:
            mass_units = total(source, peak, floor, inv_t, True)
        target = tl.maximum(tl.ceil(mass_units.to(tl.float64) * top_p).to(tl.int64), 1)
        floor = tl.maximum(floor, cut(source, peak, floor, inv_t, True, target))
    return floor
