"""Draws tokens on the CPU (numba): the exponential race of gumbel_rng.py over each row of logits.

Owns `sample_rows`. Invariant: a row's token depends on that row's inputs alone.
It depends neither on the other rows nor on the machine's vector width. The margin is to the next best token.
The winner is argmin(E_i / p_i), p_i = exp((logit_i - max) / T).
Since E = -log(u) >= 1 - u, an element can only win if 1 - u_i < best * p_i.
That bound is tested in float32 over whole blocks. The few elements that pass are scored in float64.
The bound's rounding therefore never decides. Called by sampler.py; fused/kernel.py is its twin.
"""

from math import exp, log

import numpy as np
from numba import njit

from tailrace.deployments.vllm_exact.filters_cpu import floors, moved
from tailrace.deployments.vllm_exact.gumbel_rng import GAMMA, GREEDY_BELOW, MIX_1, MIX_2, UNIFORM_SHIFT, UNIFORM_STEP

# numba's disk cache notices changes of the compiled file only. Functions compiled together therefore share one file,
# and filters_cpu.py is entered through its own cached function.
BLOCK = 512  # elements per block: its buffers stay in the first-level cache
BOUND_SLACK = 1.0002  # the float32 exponential is right within 1e-5, argument rounding included
WINDOW = 0.125  # margins up to this, divided by T, are measured; a wider window costs more scores
NO_FLOOR = np.float32(-np.inf)
_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)
_S27, _S30, _S31, _S40, _SHIFT = (np.uint64(s) for s in (27, 30, 31, 40, UNIFORM_SHIFT))
_SIGN, _ABS = np.int32(31), np.int32(0x7FFFFFFF)


@njit(error_model="numpy", nogil=True)
def _finalise(z):
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


@njit(error_model="numpy", nogil=True)
def _output(seed, index):
    return _finalise(seed + np.uint64(index + 1) * _GAMMA)


@njit(error_model="numpy", nogil=True)
def _exponential(seed, index):
    return -log((np.float64(_output(seed, index) >> _SHIFT) + 0.5) * UNIFORM_STEP)


@njit(error_model="numpy", nogil=True)
def hashed(key, position, index):
    """Returns the hashed bits (u64) of one vocabulary index; for the test that all implementations agree."""
    return _output(_output(key, position), index)


@njit(error_model="numpy", nogil=True)
def _exp32(x):
    """Returns exp(x), x <= 0, relative error below 2e-7; constant under -80. Without SVML numba vectorises no exp."""
    x = np.float32(-80.0) if x < np.float32(-80.0) else x  # NaN stays NaN
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)  # ln 2 in two parts
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(0.5)
    p = p * r * r + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(error_model="numpy", nogil=True)
def _order(x):
    """Returns a float32 as an int32 of the same order. Integer maxima vectorise; float ones only if NaN is ignored."""
    bits = np.float32(x + np.float32(0.0)).view(np.int32)  # -0.0 becomes 0.0
    return bits ^ ((bits >> _SIGN) & _ABS)


@njit(error_model="numpy", nogil=True)
def _block_max(part):
    most = np.int32(-0x80000000)
    for i in range(part.size):
        most = max(most, _order(part[i]))
    return most


@njit(error_model="numpy", nogil=True)
def _argmax(row):
    """Returns the smallest index of the largest element; an arbitrary index if the row holds NaN."""
    most, at = np.int32(-0x80000000), 0
    for begin in range(0, row.size, BLOCK):
        here = _block_max(row[begin : begin + BLOCK])
        if here > most:
            most, at = here, begin
    for i in range(at, row.size):
        if _order(row[i]) == most:
            return i
    return 0


@njit(error_model="numpy", nogil=True, cache=True)
def _argmaxes(logits, tops):
    for i in range(logits.shape[0]):
        tops[i] = _argmax(logits[i])


@njit(error_model="numpy", nogil=True, fastmath={"reassoc"})
def _weigh(part, peak, floor, inv_t, weights):
    """Fills weights with exp((logit - peak) / T); returns the sum of those from the floor on, for logprobs alone."""
    total = np.float32(0.0)
    for i in range(part.size):
        p = _exp32((part[i] - peak) * inv_t)
        weights[i] = p
        total += np.float32(0.0) if part[i] < floor else p
    return np.float64(total)


@njit(error_model="numpy", nogil=True)
def _may_win(seed, weights, best):
    """Returns whether an element of the block passes the bound. `seed` is that of the block's first element."""
    found = np.int32(0)
    for i in range(weights.size):
        short = np.float32(np.int32(_output(seed, i) >> _S40)) * np.float32(2.0**-24)  # at most 2**-24 below u
        found |= np.int32(np.float32(1.0 - 2.0**-24) - short < best * weights[i])
    return found != 0


@njit(error_model="numpy", nogil=True)
def _score(row, peak, inv_t, seed, i):
    """Returns E_i / p_i, the smallest of which wins."""
    weight = exp((np.float64(row[i]) - np.float64(peak)) * inv_t)
    return _exponential(seed, i) / weight if weight > 0.0 else np.inf


@njit(error_model="numpy", nogil=True)
def _race(row, top, floor, low, inv_t, seed, reach):
    """Returns (token, mass, best, second, rival): the winner among logits >= floor, and the sum of their weights.

    best, second: the two smallest scores of them. rival: the smallest score of logits from `low` to below the floor.
    second and rival are exact where they are below best * reach.
    """
    peak, inv_t32 = row[top], np.float32(inv_t)
    weights = np.empty(min(BLOCK, row.size), np.float32)
    best, second, rival, token, mass = _exponential(seed, top), np.inf, np.inf, top, 0.0
    for begin in range(0, row.size, BLOCK):
        part = row[begin : begin + BLOCK]
        mass += _weigh(part, peak, floor, inv_t32, weights)
        bound = np.float32(best * reach * BOUND_SLACK)
        if not _may_win(seed + np.uint64(begin) * _GAMMA, weights[: part.size], bound):
            continue
        for i in range(part.size):
            if part[i] < low:
                continue
            room = (1.0 - 2.0**-24) - np.float64(_output(seed, begin + i) >> _S40) * 2.0**-24
            if room < best * reach * BOUND_SLACK * weights[i] and begin + i != top:
                score = _score(row, peak, inv_t, seed, begin + i)
                if part[i] < floor:
                    rival = min(rival, score)
                elif score < best or (score == best and begin + i < token):
                    best, second, token = score, best, begin + i
                elif score < second:
                    second = score
    return token, mass, best, second, rival


@njit(error_model="numpy", nogil=True)
def _mass(row, peak, floor, inv_t):
    weights = np.empty(min(BLOCK, row.size), np.float32)
    mass = 0.0
    for begin in range(0, row.size, BLOCK):
        mass += _weigh(row[begin : begin + BLOCK], peak, floor, np.float32(inv_t), weights)
    return mass


@njit(error_model="numpy", nogil=True)
def _gap(row, top):
    """Returns the distance from the largest logit to the next one, 0 if they are equal; inf if there is one alone."""
    most = np.int32(-0x80000000)
    for i in range(row.size):
        most = max(most, _order(row[i]) if i != top else np.int32(-0x80000000))
    second = np.int32(most ^ ((most >> _SIGN) & _ABS)).view(np.float32)
    return np.float64(row[top]) - np.float64(second) if row.size > 1 else np.inf


@njit(error_model="numpy", nogil=True)
def _is_inside(row, peak, token, floor, inv_t, tolerance, top_p, mass):
    """Returns whether top_p surely keeps the token: it and those between it and the floor weigh more than noise moves.

    `mass`: of the kept logits, relative to the largest one's weight. Ties at the floor do not count.
    """
    edge = row[token] - np.float32(tolerance)
    needed = 2.0 * tolerance * inv_t * mass / top_p
    within = exp((np.float64(row[token]) - np.float64(peak)) * inv_t)
    for i in range(row.size):
        if within > needed:
            return True
        if floor < row[i] <= edge:
            within += exp((np.float64(row[i]) - np.float64(peak)) * inv_t)
    return within > needed


@njit(error_model="numpy", nogil=True)
def _draw(row, top, seed, temperature, floor, top_p, forced, tolerance):
    """Returns (token, logprob, raw logprob, margin in logits, edge) of one row.

    edge: 2 if the filters may drop the winner, 1 if they may keep a token that would win or come close, else 0.
    """
    peak = row[top]
    if temperature < GREEDY_BELOW:
        token = forced if forced >= 0 else top
        raw = np.float64(row[token]) - np.float64(peak) - log(_mass(row, peak, NO_FLOOR, 1.0))
        return token, (raw if forced >= 0 else abs(raw) * 0.0), raw, (np.inf if forced >= 0 else _gap(row, top)), 0
    inv_t = 1.0 / np.float64(temperature)
    margin, edge, by = np.inf, 0, tolerance * inv_t
    if forced < 0:
        reach = exp(min(max(WINDOW, by), 30.0))
        low = floor - np.float32(2.0 * tolerance) if top_p >= 1.0 else NO_FLOOR  # ranks and min_p move by no more
        token, mass, best, second, rival = _race(row, top, floor, low, inv_t, seed, reach)
        margin = log(second / best) * temperature if second < best * reach else np.inf
        if floor > NO_FLOOR:
            certain = row[token] > floor + np.float32(2.0 * tolerance)
            certain = certain and (top_p >= 1.0 or _is_inside(row, peak, token, floor, inv_t, tolerance, top_p, mass))
            edge = (1 if rival < best * exp(min(by, 30.0)) else 0) if certain else 2
    else:
        token = forced
        floor = floor if row[token] >= floor else NO_FLOOR
        mass = _mass(row, peak, floor, inv_t)
    below_peak = np.float64(row[token]) - np.float64(peak)
    logprob = below_peak * inv_t - log(mass)
    if inv_t == 1.0 and floor == NO_FLOOR:
        return token, logprob, logprob, margin, edge
    return token, logprob, below_peak - log(_mass(row, peak, NO_FLOOR, 1.0)), margin, edge


@njit(error_model="numpy", nogil=True, cache=True)
def _draw_rows(logits, tops, keys, positions, temperature, floor, top_p, forced, tolerance, out):
    tokens, logprobs, raw_logprobs, margins, edges = out
    for i in range(logits.shape[0]):
        seed, here = _output(keys[i], positions[i]), np.int64(forced[i])
        drawn = _draw(logits[i], tops[i], seed, temperature[i], floor[i], top_p[i], here, np.float64(tolerance[i]))
        tokens[i], logprobs[i], raw_logprobs[i], margins[i], edges[i] = drawn


@njit(error_model="numpy", nogil=True, cache=True)
def _edge_margins(logits, tops, keys, positions, temperature, floor, wide, tight, tokens, margins):
    """Lowers margins[i] to that of logits from wide[i] to below the floor, and to 0 if the winner is below tight[i]."""
    for i in range(logits.shape[0]):
        row, inv_t, seed = logits[i], 1.0 / np.float64(temperature[i]), _output(keys[i], positions[i])
        peak, token = row[tops[i]], np.int64(tokens[i])
        best = _score(row, peak, inv_t, seed, token)
        for j in range(row.size):
            if wide[i] <= row[j] < floor[i]:
                gap = log(max(1.0, _score(row, peak, inv_t, seed, j) / best)) * temperature[i]
                margins[i] = min(margins[i], gap)
        if row[token] < tight[i]:
            margins[i] = 0.0


def sample_rows(logits, keys, positions, temperature, top_p, top_k, min_p, forced, tolerance):
    """Draws one token per row; a row with forced[i] >= 0 emits that token and reports its logprobs.

    logits f32[n, V] (array or CPU tensor), keys u64[n], positions i64[n], temperature, top_p, min_p f32[n],
    top_k i32[n] (0: off), forced i32[n] (-1: none), tolerance f32[n], see `margins`.
    Returns (tokens i32[n], logprobs f32[n], raw_logprobs f32[n], margins f32[n]). Logprobs are in nats.
    `logprobs` are under the sampling distribution, and 0 if greedy; NaN if no token is left, at any temperature.
    For a forced token that the filters drop, they are under the unfiltered tempered distribution; for a forced token of
    a greedy row, they are the raw ones.
    `raw_logprobs` are under softmax(logits). A row that is no distribution (NaN, nothing finite) reports NaN.
    `margins`: how far the logits of two candidates must move apart before another token wins; inf if far, or forced.
    A token that the filters keep or drop only within `tolerance` of an edge counts as kept and as dropped.
    Raises ValueError if a forced token is outside the vocabulary. Source: the Gumbel-max trick in its exponential form.
    One thread: a row of 49,152 takes about 0.03 ms, less than a second thread would save.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    rows, vocab = logits.shape
    if rows and forced.max() >= vocab:
        raise ValueError(f"forced token {forced.max()} is outside the vocabulary of {vocab}")
    tops, floor = np.empty(rows, np.int64), np.empty(rows, np.float32)
    out = (np.empty(rows, np.int32), *np.empty((3, rows), np.float32), np.empty(rows, np.int8))
    _argmaxes(logits, tops)
    floors(logits, tops, temperature, top_p, top_k, min_p, floor)
    _draw_rows(logits, tops, keys, positions, temperature, floor, top_p, forced, tolerance, out)
    tokens, logprobs, raw_logprobs, margins, edges = out
    if edges.any():
        at = np.flatnonzero(edges)
        part, tops, heat = logits[at], tops[at], temperature[at]
        filters, slack = (top_p[at], top_k[at], min_p[at]), tolerance[at]
        wide, tight, drops = np.empty(at.size, np.float32), np.full(at.size, NO_FLOOR), edges[at] == 2
        floors(part, tops, heat, *moved(*filters, slack / heat), wide)
        if drops.any():
            lowest = np.empty(drops.sum(), np.float32)
            filters = moved(*(column[drops] for column in filters), -(slack / heat)[drops])
            floors(part[drops], tops[drops], heat[drops], *filters, lowest)
            tight[drops] = lowest + slack[drops]
        lowered = margins[at]
        edge = (floor[at], wide - slack, tight, tokens[at], lowered)
        _edge_margins(part, tops, keys[at], positions[at], heat, *edge)
        margins[at] = lowered
    return tokens, logprobs, raw_logprobs, margins


def warm_up() -> None:
    """Compiles (or loads from numba's cache) all that `sample_rows` runs: equal logits, a top_k, a tolerance."""
    logits, one = np.zeros((1, 8), np.float32), np.ones(1, np.float32)
    rows = (np.zeros(1, np.uint64), np.zeros(1, np.int64), one, one, np.full(1, 4, np.int32), 0 * one)
    sample_rows(logits, *rows, np.full(1, -1, np.int32), one)
