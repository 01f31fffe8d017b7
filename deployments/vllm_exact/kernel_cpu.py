"""Draws tokens on the CPU (numba): the exponential race of gumbel_rng.py over each row of logits.

Owns `sample_rows`. Invariant: a row's token depends on that row's inputs alone.
It depends neither on the other rows nor on the machine's vector width.
The winner is argmin(E_i / p_i), p_i = exp((logit_i - max) / T).
Since E = -log(u) >= 1 - u, an element can only win if 1 - u_i < best * p_i.
That bound is tested in float32 over whole blocks. The few elements that pass are scored in float64.
The bound's rounding therefore never decides. Called by sampler.py; kernel_gpu.py is its twin.
"""

from math import exp, log

import numpy as np
from numba import njit

from tailrace.deployments.vllm_exact.filters_cpu import floors
from tailrace.deployments.vllm_exact.gumbel_rng import GAMMA, GREEDY_BELOW, MIX_1, MIX_2, UNIFORM_SHIFT, UNIFORM_STEP

# numba's disk cache notices changes of the compiled file only. Functions compiled together therefore share one file,
# and filters_cpu.py is entered through its own cached function.
BLOCK = 512  # elements per block: its buffers stay in the first-level cache
BOUND_SLACK = 1.0002  # the float32 exponential is right within 1e-5, argument rounding included
NO_FLOOR = np.float32(-np.inf)
_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)
_S27, _S30, _S31, _S40, _SHIFT = (np.uint64(s) for s in (27, 30, 31, 40, UNIFORM_SHIFT))
_SIGN, _ABS = np.int32(31), np.int32(0x7FFFFFFF)


@njit(nogil=True)
def _finalise(z):
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


@njit(nogil=True)
def _output(seed, index):
    return _finalise(seed + np.uint64(index + 1) * _GAMMA)


@njit(nogil=True)
def _exponential(seed, index):
    return -log((np.float64(_output(seed, index) >> _SHIFT) + 0.5) * UNIFORM_STEP)


@njit(nogil=True)
def hashed(key, position, index):
    """Returns the hashed bits (u64) of one vocabulary index; for the test that all implementations agree."""
    return _output(_output(key, position), index)


@njit(nogil=True)
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


@njit(nogil=True)
def _order(x):
    """Returns a float32 as an int32 of the same order. Integer maxima vectorise; float ones only if NaN is ignored."""
    bits = np.float32(x + np.float32(0.0)).view(np.int32)  # -0.0 becomes 0.0
    return bits ^ ((bits >> _SIGN) & _ABS)


@njit(nogil=True)
def _block_max(part):
    most = np.int32(-0x80000000)
    for i in range(part.size):
        most = max(most, _order(part[i]))
    return most


@njit(nogil=True)
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


@njit(nogil=True, cache=True)
def _argmaxes(logits, tops):
    for i in range(logits.shape[0]):
        tops[i] = _argmax(logits[i])


@njit(nogil=True, fastmath={"reassoc"})
def _weigh(part, peak, floor, inv_t, weights):
    """Fills weights with exp((logit - peak) / T), 0 under the floor; returns their sum, which only logprobs use."""
    total = np.float32(0.0)
    for i in range(part.size):
        p = _exp32((part[i] - peak) * inv_t)
        p = np.float32(0.0) if part[i] < floor else p
        weights[i] = p
        total += p
    return np.float64(total)


@njit(nogil=True)
def _may_win(seed, weights, best):
    """Returns whether an element of the block passes the bound. `seed` is that of the block's first element."""
    found = np.int32(0)
    for i in range(weights.size):
        short = np.float32(np.int32(_output(seed, i) >> _S40)) * np.float32(2.0**-24)  # at most 2**-24 below u
        found |= np.int32(np.float32(1.0 - 2.0**-24) - short < best * weights[i])
    return found != 0


@njit(nogil=True)
def _race(row, top, floor, inv_t, seed):
    """Returns (token, mass): the winner among logits >= floor, and the sum of their weights exp((logit - peak) / T)."""
    peak, inv_t32 = row[top], np.float32(inv_t)
    weights = np.empty(min(BLOCK, row.size), np.float32)
    best, token, mass = _exponential(seed, top), top, 0.0
    for begin in range(0, row.size, BLOCK):
        part = row[begin : begin + BLOCK]
        mass += _weigh(part, peak, floor, inv_t32, weights)
        bound = np.float32(best * BOUND_SLACK)
        if not _may_win(seed + np.uint64(begin) * _GAMMA, weights[: part.size], bound):
            continue
        for i in range(part.size):
            if part[i] < floor:
                continue
            room = (1.0 - 2.0**-24) - np.float64(_output(seed, begin + i) >> _S40) * 2.0**-24
            if room < best * BOUND_SLACK * weights[i]:
                weight = exp((np.float64(part[i]) - np.float64(peak)) * inv_t)
                score = _exponential(seed, begin + i) / weight if weight > 0.0 else np.inf
                if score < best or (score == best and begin + i < token):
                    best, token = score, begin + i
    return token, mass


@njit(nogil=True)
def _mass(row, peak, floor, inv_t):
    weights = np.empty(min(BLOCK, row.size), np.float32)
    mass = 0.0
    for begin in range(0, row.size, BLOCK):
        mass += _weigh(row[begin : begin + BLOCK], peak, floor, np.float32(inv_t), weights)
    return mass


@njit(nogil=True)
def _draw(row, top, seed, temperature, floor, forced):
    """Returns (token, logprob, raw logprob) of one row."""
    peak = row[top]
    if temperature < GREEDY_BELOW:
        token = forced if forced >= 0 else top
        raw = np.float64(row[token]) - np.float64(peak) - log(_mass(row, peak, NO_FLOOR, 1.0))
        return token, (raw if forced >= 0 else 0.0), raw
    inv_t = 1.0 / np.float64(temperature)
    if forced < 0:
        token, mass = _race(row, top, floor, inv_t, seed)
    else:
        token = forced
        floor = floor if row[token] >= floor else NO_FLOOR
        mass = _mass(row, peak, floor, inv_t)
    below_peak = np.float64(row[token]) - np.float64(peak)
    logprob = below_peak * inv_t - log(mass)
    if inv_t == 1.0 and floor == NO_FLOOR:
        return token, logprob, logprob
    return token, logprob, below_peak - log(_mass(row, peak, NO_FLOOR, 1.0))


@njit(nogil=True, cache=True)
def _draw_rows(logits, tops, keys, positions, temperature, floor, forced, tokens, logprobs, raw_logprobs):
    for i in range(logits.shape[0]):
        seed = _output(keys[i], positions[i])
        drawn = _draw(logits[i], tops[i], seed, temperature[i], floor[i], np.int64(forced[i]))
        tokens[i], logprobs[i], raw_logprobs[i] = drawn


def sample_rows(logits, keys, positions, temperature, top_p, top_k, min_p, forced):
    """Draws one token per row; a row with forced[i] >= 0 emits that token and reports its logprobs.

    logits f32[n, V] (array or CPU tensor), keys u64[n], positions i64[n], temperature, top_p, min_p f32[n],
    top_k i32[n] (0: off), forced i32[n] (-1: none).
    Returns (tokens i32[n], logprobs f32[n], raw_logprobs f32[n]). Logprobs are in nats.
    `logprobs` are under the sampling distribution, and 0 if greedy.
    For a forced token that the filters drop, they are under the unfiltered tempered distribution.
    `raw_logprobs` are under softmax(logits). A row that is no distribution (NaN, nothing finite) reports NaN.
    Raises ValueError if a forced token is outside the vocabulary. Source: the Gumbel-max trick in its exponential form.
    One thread: a row of 49,152 takes about 0.03 ms, less than a second thread would save.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    rows, vocab = logits.shape
    if rows and forced.max() >= vocab:
        raise ValueError(f"forced token {forced.max()} is outside the vocabulary of {vocab}")
    tops, floor = np.empty(rows, np.int64), np.empty(rows, np.float32)
    out = np.empty(rows, np.int32), np.empty(rows, np.float32), np.empty(rows, np.float32)
    _argmaxes(logits, tops)
    floors(logits, tops, temperature, top_p, top_k, min_p, floor)
    _draw_rows(logits, tops, keys, positions, temperature, floor, forced, *out)
    return out
