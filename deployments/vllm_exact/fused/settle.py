"""The second launch: one program a row takes the numbers of scan.py, and draws.

A row without filters, or greedy, needs a few more logits at most. For a row with filters the logits are read once
more: the candidates go to a buffer, from which floors, the race and margins come. Invariant: token and floor are those
of kernel_cpu.py. Called by kernel.py.
"""

import triton
import triton.language as tl

from tailrace.deployments.vllm_exact.fused.candidates import candidates
from tailrace.deployments.vllm_exact.fused.noise import NONE, is_nan, output, value
from tailrace.deployments.vllm_exact.fused.race import filtered, score_of, two_best
from tailrace.deployments.vllm_exact.fused.scan import BINS, FLOATS, GREEDY, INTS, OPEN

COLUMNS = tl.constexpr(8)  # of a row's filters


@triton.jit
def _together(left, left_floats, there, part, vocab, inv_t, PARTS: tl.constexpr):
    """Returns (top i32, peak f32, distance to the second f64, masses f64 at temperature 1 and T) of a row's parts."""
    tops = tl.load(left, there, other=NONE)
    most = tl.max(tops, 0)
    first = tl.min(tl.where((tops == most) & there, part, PARTS), 0)
    top = tl.min(tl.where(part == first, tl.load(left + 1, there, other=0), 0x7FFFFFFF), 0)
    peak = value(most)
    second = value(tl.max(tl.where(part == first, tl.load(left + 2, there, other=NONE), tops), 0))
    gap = tl.where(vocab > 1, peak.to(tl.float64) - second.to(tl.float64), float("inf"))
    apart = tl.where(there, value(tops).to(tl.float64) - peak.to(tl.float64), -float("inf"))
    raw_mass = tl.sum(tl.load(left_floats, there, other=0.0) * tl.exp(apart), 0)
    mass = tl.sum(tl.load(left_floats + 1, there, other=0.0) * tl.exp(apart * inv_t), 0)
    return top, peak, gap, raw_mass, mass


@triton.jit
def _open(row, left, there, peak, inv_t, reach, seed, temperature):
    """Returns (token i32, margin f64) of a row without filters, from the two best tokens of each part."""
    infinite = tl.full((), float("inf"), tl.float64)
    best, second, token = infinite, infinite, tl.full((), 0x7FFFFFFF, tl.int32)
    for which in tl.static_range(2):
        index = tl.load(left + 3 + which, there, other=-1)
        x = tl.load(row + index, index >= 0, other=-float("inf")).to(tl.float32)
        scores = tl.where(index >= 0, score_of(x, index, peak, inv_t, seed), infinite)
        best, second, token = two_best(scores, index, best, second, token)
    return token, tl.where(second < best * reach, tl.log(second / best) * temperature, float("inf"))


@triton.jit
def settle(
    logits, stride, vocab, keys, positions, heat, plan, filters, parts, ints, floats, counts, kept, kept_at, room_for,
    tokens, values, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills tokens i32[n] and values f32[n, 3]: logprob, raw logprob and margin, as `kernel_cpu.sample_rows`."""
    at = tl.program_id(0).to(tl.int64)
    row, own_filters, part = logits + at * stride, filters + at * COLUMNS, tl.arange(0, PARTS)
    seed = output(tl.load(keys + at).to(tl.uint64, bitcast=True), tl.load(positions + at))
    inv_t, reach, temperature = tl.load(heat + at * 3), tl.load(heat + at * 3 + 1), tl.load(own_filters + 7)
    mode, top_k, forced = tl.load(plan + at * 3), tl.load(plan + at * 3 + 1), tl.load(plan + at * 3 + 2)
    left, left_floats, there = ints + (at * parts + part) * INTS, floats + (at * parts + part) * FLOATS, part < parts
    top, peak, margin, raw_mass, mass = _together(left, left_floats, there, part, vocab, inv_t, PARTS)
    token = top
    floor = tl.full((), -float("inf"), tl.float32)
    if mode != GREEDY:
        margin = tl.full((), float("inf"), tl.float64)
        if (peak > -float("inf")) & (peak < float("inf")):  # else no distribution: the logprobs are NaN
            if mode != OPEN:
                own, own_at = kept + at * room_for, kept_at + at * room_for
                per_logit = tl.load(heat + at * 3 + 2).to(tl.float32)
                source, sums = candidates(
                    row, vocab, own, own_at, room_for, peak, mass, inv_t, per_logit, top_k, own_filters,
                    floats + at * parts * FLOATS, counts + at * parts * BINS, parts, BLOCK,
                )  # fmt: skip
                drawn = filtered(source, vocab, peak, inv_t, reach, seed, top_k, own_filters, sums, row, forced)
                token, margin, inner, floor = drawn
                asked = tl.where(forced >= 0, forced, token)
                wanted = tl.load(row + asked, (asked >= 0) & (asked < vocab), other=0.0).to(tl.float32)
                floor = tl.where(wanted >= floor, floor, -float("inf"))
                mass = tl.where(floor > -float("inf"), inner, mass)
            elif forced < 0:
                token, margin = _open(row, left, there, peak, inv_t, reach, seed, temperature)
    lost = (token < 0) | (token >= vocab)  # parameters that are no numbers leave no candidate
    token = tl.where(lost, top, token)
    token, margin = tl.where(forced >= 0, forced, token), tl.where(forced >= 0, float("inf"), margin)
    below = tl.load(row + token).to(tl.float64) - peak.to(tl.float64)
    raw, logprob = below - tl.log(raw_mass), below * inv_t - tl.log(mass)
    if mode == GREEDY:
        logprob = tl.where((forced >= 0) | is_nan(raw.to(tl.float32)), raw, 0.0)  # NaN where no token is left
    logprob = tl.where(lost, float("nan"), logprob)
    tl.store(tokens + at, token)
    tl.store(values + at * 3, logprob.to(tl.float32))
    tl.store(values + at * 3 + 1, raw.to(tl.float32))
    tl.store(values + at * 3 + 2, margin.to(tl.float32))
