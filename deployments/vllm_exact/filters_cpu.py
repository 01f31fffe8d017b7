"""min_p, top_k and top_p as one number per row: the smallest logit that is kept (numba).

Every filter keeps a token by its probability, so it keeps the logits above a floor, ties at the floor included.
Invariant: masses are summed as integers, in units of 2**-44 of the likeliest token's weight.
The floor therefore depends neither on the order of summation nor on the vector width.
The row is not sorted: the floor is bracketed and bisected, and only the last few values are sorted.
Called by kernel_cpu.py.
"""

from math import ceil, log

import numpy as np
from numba import njit

from tailrace.deployments.vllm_exact.gumbel_rng import GREEDY_BELOW, MASS_UNITS

BAND = 128  # at this count, values are sorted instead of bisected further
BISECTIONS = 48  # enough to separate any two float32 values of one bracket; equal values cannot be separated
LOWEST = np.float32(np.finfo(np.float32).min)  # a logit of -inf is masked out: its token cannot be drawn


@njit(error_model="numpy", nogil=True)
def _exp64(x):
    """Returns exp(x), x <= 0, relative error below 1e-15; 0 units below -44. Vectorises (no library call)."""
    x = x if x > -700.0 else -700.0
    n = np.floor(x * 1.4426950408889634074 + 0.5)
    r = x - n * 6.93145751953125e-1
    r = r - n * 1.42860682030941723212e-6
    p = 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r * r + r + 1.0
    return p * np.int64((np.int64(n) + np.int64(1023)) << np.int64(52)).view(np.float64)


@njit(error_model="numpy", nogil=True)
def _units(row, peak, floor, inv_t, units):
    """Fills units with each kept token's weight in integer units."""
    for i in range(row.size):
        weight = _exp64((np.float64(row[i]) - np.float64(peak)) * inv_t) * MASS_UNITS
        units[i] = np.int64(weight) if row[i] >= floor else np.int64(0)


@njit(error_model="numpy", nogil=True)
def _ones(row, floor, units):
    for i in range(row.size):
        units[i] = np.int64(row[i] >= floor)


@njit(error_model="numpy", nogil=True)
def _above(values, units, bar):
    """Returns the units of the values strictly above bar."""
    total = np.int64(0)
    for i in range(values.size):
        total += units[i] if values[i] > bar else np.int64(0)
    return total


@njit(error_model="numpy", nogil=True)
def _gather(values, units, low, high, out_values, out_units):
    """Moves entries with low < value <= high to the front of the outputs, which may be the inputs; returns a count."""
    count = 0
    for i in range(values.size):
        out_values[count], out_units[count] = values[i], units[i]
        count += np.int64(low < values[i] <= high)
    return count


@njit(error_model="numpy", nogil=True)
def cut(row, units, target, peak, reach):
    """Returns the floor: a value is kept if the units strictly above it are fewer than target.

    1 <= target <= the sum of the units.
    Bracket: the units above `low` reach the target, those above `high` do not. `reach` is a first guess of the width.
    """
    reach = reach if reach > 1e-30 else 1.0  # it doubles until it reaches; NaN never would
    high, over_high, low = peak, np.int64(0), np.float32(peak - reach)
    over = _above(row, units, low)
    while over < target and low > np.float32(-np.inf):
        reach *= 2.0
        high, over_high, low = low, over, np.float32(peak - reach)
        over = _above(row, units, low)
    band, band_units = np.empty(row.size, np.float32), np.empty(row.size, np.int64)
    count = _gather(row, units, low, high, band, band_units)
    for _ in range(BISECTIONS):
        if count <= BAND:
            break
        middle = np.float32(0.5 * (np.float64(low) + np.float64(high)))
        over = over_high + _above(band[:count], band_units[:count], middle)
        if over >= target:
            low = middle
        else:
            high, over_high = middle, over
        count = _gather(band[:count], band_units[:count], low, high, band, band_units)
    order = np.argsort(band[:count])[::-1]
    floor = np.nextafter(high, np.float32(np.inf))
    for place in order:
        if band[place] != floor and over_high >= target:
            break
        floor = band[place]
        over_high += band_units[place]
    return floor


@njit(error_model="numpy", nogil=True)
def _floor(row, peak, temperature, top_p, top_k, min_p):
    floor = np.float32(-np.inf)
    if not (LOWEST <= peak < np.float32(np.inf)):
        return floor  # no distribution: the caller's logprob will be NaN
    if min_p > 0.0:
        bar = np.float64(peak) + log(np.float64(min_p)) * temperature
        floor = np.float32(bar)
        floor = floor if np.float64(floor) >= bar else np.nextafter(floor, np.float32(np.inf))
    units = np.empty(row.size, np.int64)
    if 0 < top_k < row.size:
        _ones(row, max(floor, LOWEST), units)
        if units.sum() > top_k:
            floor = max(floor, cut(row, units, np.int64(top_k), peak, 4.0 * temperature))
    if top_p < 1.0:
        _units(row, peak, floor, 1.0 / temperature, units)
        target = max(np.int64(1), np.int64(ceil(np.float64(units.sum()) * np.float64(top_p))))
        floor = max(floor, cut(row, units, target, peak, 4.0 * temperature))
    return floor


@njit(error_model="numpy", nogil=True, cache=True)
def floors(logits, tops, temperature, top_p, top_k, min_p, out):
    """Fills out f32[n] with each row's smallest kept logit after min_p, then top_k, then top_p; -inf: all are kept.

    logits f32[n, V] contiguous, tops i64[n] (each row's argmax), temperature, top_p, min_p f32[n], top_k i32[n]
    (0: off). The likeliest token always stays.
    """
    for i in range(logits.shape[0]):
        open_row = min_p[i] <= 0.0 and top_p[i] >= 1.0 and not 0 < top_k[i] < logits.shape[1]
        if open_row or temperature[i] < GREEDY_BELOW:
            out[i] = -np.inf
        else:
            out[i] = _floor(logits[i], logits[i, tops[i]], np.float64(temperature[i]), top_p[i], top_k[i], min_p[i])


def moved(top_p, top_k, min_p, by):
    """Returns the filters (f32[n], i32[n], f32[n]) that keep a little more, by > 0, or less, where they filter.

    A relative change of all weights by `by` changes no share of the mass by more. top_k is as it was: ranks change
    only between logits as close as the tolerance, by which the caller moves the floor.
    """
    tiny = np.float32(1e-6)
    top_p = np.where(top_p < 1.0, np.clip(top_p + by, tiny, 1.0), top_p).astype(np.float32)
    return top_p, top_k, np.where(min_p > 0.0, np.minimum(min_p * np.exp(-by), 1.0), min_p).astype(np.float32)
