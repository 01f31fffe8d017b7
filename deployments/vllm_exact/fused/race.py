"""The race among the candidates of a row, in Triton: the winner among those that filters keep, and its margin.

Invariant: scores are those of kernel_cpu.py in float64, so they decide as there. Called by settle.py.
"""

import triton
import triton.language as tl

from tailrace.deployments.vllm_exact.fused.cuts import floor_of, piece
from tailrace.deployments.vllm_exact.fused.noise import exponential, is_nan, output, weight

LOOK = tl.constexpr(512)  # candidates per look


@triton.jit
def score_of(x, index, peak, inv_t, seed):
    """Returns E / p of tokens, f64: the smallest wins; inf where p is 0."""
    p = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) * inv_t)
    return tl.where(p > 0.0, exponential(output(seed, index)) / p, float("inf"))


@triton.jit
def two_best(scores, index, best, second, token):
    """Returns (best, second, token) after these tokens; the smaller index wins a tie."""
    own = tl.min(scores, 0)
    at = tl.min(tl.where(scores == own, index, 0x7FFFFFFF), 0)
    rest = tl.min(tl.where(index == at, float("inf"), scores), 0)
    wins = (own < best) | ((own == best) & (at < token))
    second = tl.where(wins, tl.minimum(best, rest), tl.minimum(second, own))
    return tl.where(wins, own, best), second, tl.where(wins, at, token)


@triton.jit
def _race(source, vocab, peak, floor, low, inv_t, seed):
    """Returns (best, second, token, rival, mass) of the candidates: scores f64 as in kernel_cpu.py.

    rival: the best score of those from `low` to below the floor. mass f64: of those from the floor on.
    """
    infinite = tl.full((), float("inf"), tl.float64)
    best, second, rival, token = infinite, infinite, infinite, tl.full((), 0x7FFFFFFF, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    for begin in range(0, source[3] + source[4], LOOK):
        x, index, here = piece(source, begin, LOOK)
        p = weight(x, peak, inv_t.to(tl.float32))
        mass += tl.sum(tl.where(here & ((x >= floor) | is_nan(x)), p, 0.0), 0).to(tl.float64)
        scores = tl.where(here & (x >= low), score_of(x, index, peak, inv_t, seed), infinite)
        rival = tl.minimum(rival, tl.min(tl.where(x < floor, scores, infinite), 0))
        best, second, token = two_best(tl.where(x >= floor, scores, infinite), index, best, second, token)
    return best, second, token, rival, mass


@triton.jit
def _inside(source, peak, own, floor, inv_t, tolerance, needed):
    """Returns whether a token of logit `own` and the candidates between it and the floor weigh more than `needed`."""
    within = tl.exp((own.to(tl.float64) - peak.to(tl.float64)) * inv_t)
    edge = own - tolerance.to(tl.float32)
    for begin in range(0, source[3] + source[4], LOOK):
        x, _, here = piece(source, begin, LOOK)
        p = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) * inv_t)
        within += tl.sum(tl.where(here & (x > floor) & (x <= edge), p, 0.0), 0)
    return within > needed


@triton.jit
def _nearest(source, peak, floor, wide, inv_t, seed, best):
    """Returns f64: the distance, of logits over T, from the winner's score to the best from `wide` to the floor."""
    rival = tl.full((), float("inf"), tl.float64)
    for begin in range(0, source[3] + source[4], LOOK):
        x, index, here = piece(source, begin, LOOK)
        scores = score_of(x, index, peak, inv_t, seed)
        rival = tl.minimum(rival, tl.min(tl.where(here & (x >= wide) & (x < floor), scores, float("inf")), 0))
    return tl.log(tl.maximum(rival / best, 1.0))


@triton.jit
def filtered(source, vocab, peak, inv_t, reach, seed, top_k, filters, sums, row, forced):
    """Returns (token i32, margin f64, mass f64, floor f32) of a row with filters.

    The margin is that of kernel_cpu.py up to the tolerance, and above the tolerance where that is.
    """
    top_p, tolerance, temperature = tl.load(filters + 3), tl.load(filters + 6), tl.load(filters + 7)
    slack, by = tolerance.to(tl.float32), tolerance * inv_t
    floor = floor_of(source, peak, inv_t, tl.load(filters), top_k, vocab, top_p, sums[0])
    low = tl.where(top_p >= 1.0, floor - 2.0 * slack, -float("inf"))
    best, second, token, rival, mass = _race(source, vocab, peak, floor, low, inv_t, seed)
    margin = tl.where(second < best * reach, tl.log(second / best) * temperature, float("inf"))
    if (floor > -float("inf")) & (forced < 0):
        own = tl.load(row + token, token < vocab, other=0.0).to(tl.float32)
        certain = own > floor + 2.0 * slack
        if certain & (top_p < 1.0):
            certain = _inside(source, peak, own, floor, inv_t, tolerance, 2.0 * by * mass / top_p)
        if (rival < best * tl.exp(tl.minimum(by, 30.0))) | (certain == 0):
            wide = floor_of(source, peak, inv_t, tl.load(filters + 1), top_k, vocab, tl.load(filters + 4), sums[1])
            gap = _nearest(source, peak, floor, wide - slack, inv_t, seed, best) * temperature
            margin = tl.minimum(margin, gap)
        if certain == 0:
            tight = floor_of(source, peak, inv_t, tl.load(filters + 2), top_k, vocab, tl.load(filters + 5), sums[2])
            margin = tl.where(own < tight + slack, 0.0, margin)
    return token, margin, mass, floor
