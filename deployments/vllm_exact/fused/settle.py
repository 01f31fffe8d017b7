"""The second launch: one program a row takes what scan.py left, and draws.

A row without filters, or greedy, needs no more of its logits than a few. For a row with filters the logits are read once more: those
above a safe bound go to a buffer, from which floors, the race and margins come. If they do not fit, the row itself
is read instead, several times. Invariant: token and floor are those of kernel_cpu.py. Called by kernel.py.
"""

import triton
import triton.language as tl

from tailrace.deployments.vllm_exact.fused.cuts import bar_of, floor_of, heavy, piece, ranked
from tailrace.deployments.vllm_exact.fused.noise import NONE, exponential, order, output, units, value, weight
from tailrace.deployments.vllm_exact.fused.scan import FLOATS, GREEDY, INTS, OPEN

LOOK = tl.constexpr(512)  # candidates per look
SHAPE = tl.constexpr(8)  # columns of a row's filters


@triton.jit
def _score(x, index, peak, inv_t, seed):
    """Returns E / p of tokens, f64: the smallest wins; inf where p is 0."""
    p = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) * inv_t)
    return tl.where(p > 0.0, exponential(output(seed, index)) / p, float("inf"))


@triton.jit
def _two(scores, index, best, second, token):
    """Returns (best, second, token) after these tokens; the smaller index wins a tie."""
    own = tl.min(scores, 0)
    at = tl.min(tl.where(scores == own, index, 0x7FFFFFFF), 0)
    rest = tl.min(tl.where(index == at, float("inf"), scores), 0)
    wins = (own < best) | ((own == best) & (at < token))
    second = tl.where(wins, tl.minimum(best, rest), tl.minimum(second, own))
    return tl.where(wins, own, best), second, tl.where(wins, at, token)


@triton.jit
def _gather(row, vocab, kept, kept_at, room_for, peak, inv_t, theta, slack, bars, weighs, BLOCK: tl.constexpr):
    """Moves the logits from theta on, and NaN, to the buffer, if they fit. Returns their number and units i64.

    Units: of the row from each of three bars on, and, of those from the second bar on, of logits above theta by `slack`.
    """
    count, zero = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    sums = zero, zero, zero, zero
    for begin in range(0, vocab, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        own = tl.load(row + index, index < vocab, other=-float("inf"))
        x = own.to(tl.float32)
        passes = ((x >= theta) | (x != x)) & (index < vocab)
        number = passes.to(tl.int32)
        place = count + tl.cumsum(number, 0) - number
        tl.store(kept + place, own, passes & (place < room_for))
        tl.store(kept_at + place, index, passes & (place < room_for))
        count += tl.sum(number, 0)
        if weighs:
            some = tl.where(index < vocab, units(x, peak, -float("inf"), inv_t), 0)
            sums = (
                sums[0] + tl.sum(tl.where(x >= bars[0], some, 0), 0),
                sums[1] + tl.sum(tl.where(x >= bars[1], some, 0), 0),
                sums[2] + tl.sum(tl.where(x >= bars[2], some, 0), 0),
                sums[3] + tl.sum(tl.where((x >= bars[1]) & (x > theta + slack), some, 0), 0),
            )
    tl.debug_barrier()  # the buffer is read by other threads than those that filled it
    return count, sums


@triton.jit
def _bound(
    peak, mass, vocab, inv_t, slack, drop, top_p, top_k, groups, rank, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Returns (theta, safe) f32: a logit below every token that the widest filters may keep, or come close to that.

    `safe` is surely so: min_p's bar, and for top_k the top_k + 1-th largest of the groups' largest logits. For top_p
    theta is a guess, to be tested by the units above it: the groups' largest logits above it weigh enough, or it is
    their rank-th, at which the buffer is about half full.
    """
    safe = bar_of(peak, drop) - slack
    theta, number = safe, (vocab + GROUP - 1) // GROUP
    limits = (top_k > 0) & (top_k < vocab)
    if (limits & (top_k < number)) | ((limits == 0) & (top_p < 1.0) & (rank < number)):
        offsets = tl.arange(0, GROUPS)
        keys = tl.load(groups + offsets, offsets < number, other=NONE)
        if limits:
            theta = tl.maximum(theta, value(ranked(keys, top_k + 1)) - slack)
            safe = theta
        else:
            p = tl.where(offsets < number, weight(value(keys), peak, inv_t.to(tl.float32)), 0.0)
            needed = (mass * (1.0 - (1.0 - top_p) * 0.99)).to(tl.float32)
            guess = tl.maximum(value(ranked(keys, rank)), value(heavy(keys, p, needed)))
            theta = tl.maximum(theta, guess - slack)
    return theta, safe


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
        mass += tl.sum(tl.where(here & ((x >= floor) | (x != x)), p, 0.0), 0).to(tl.float64)
        scores = tl.where(here & (x >= low), _score(x, index, peak, inv_t, seed), infinite)
        rival = tl.minimum(rival, tl.min(tl.where(x < floor, scores, infinite), 0))
        best, second, token = _two(tl.where(x >= floor, scores, infinite), index, best, second, token)
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
        scores = _score(x, index, peak, inv_t, seed)
        rival = tl.minimum(rival, tl.min(tl.where(here & (x >= wide) & (x < floor), scores, float("inf")), 0))
    return tl.log(tl.maximum(rival / best, 1.0))


@triton.jit
def _filtered(source, vocab, peak, inv_t, reach, seed, top_k, shape, sums, row, forced):
    """Returns (token i32, margin f64, mass f64, floor f32) of a row with filters.

    The margin is that of kernel_cpu.py up to the tolerance, and above the tolerance where that is.
    """
    top_p, tolerance, temperature = tl.load(shape + 3), tl.load(shape + 6), tl.load(shape + 7)
    slack, by = tolerance.to(tl.float32), tolerance * inv_t
    floor = floor_of(source, peak, inv_t, tl.load(shape), top_k, vocab, top_p, sums[0])
    low = tl.where(top_p >= 1.0, floor - 2.0 * slack, -float("inf"))
    best, second, token, rival, mass = _race(source, vocab, peak, floor, low, inv_t, seed)
    margin = tl.where(second < best * reach, tl.log(second / best) * temperature, float("inf"))
    if (floor > -float("inf")) & (forced < 0):
        own = tl.load(row + token).to(tl.float32)
        certain = own > floor + 2.0 * slack
        if certain & (top_p < 1.0):
            certain = _inside(source, peak, own, floor, inv_t, tolerance, 2.0 * by * mass / top_p)
        if (rival < best * tl.exp(tl.minimum(by, 30.0))) | (certain == 0):
            wide = floor_of(source, peak, inv_t, tl.load(shape + 1), top_k, vocab, tl.load(shape + 4), sums[1])
            gap = _nearest(source, peak, floor, wide - slack, inv_t, seed, best) * temperature
            margin = tl.minimum(margin, gap)
        if certain == 0:
            tight = floor_of(source, peak, inv_t, tl.load(shape + 2), top_k, vocab, tl.load(shape + 5), sums[2])
            margin = tl.where(own < tight + slack, 0.0, margin)
    return token, margin, mass, floor


@triton.jit
def settle(
    logits, stride, vocab, keys, positions, heat, plan, shapes, parts, ints, floats, groups, kept, kept_at, room_for,
    rank, tokens, values, PARTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills tokens i32[n] and values f32[n, 3]: logprob, raw logprob and margin, as `kernel_cpu.sample_rows`."""
    at_row = tl.program_id(0).to(tl.int64)
    row, shape = logits + at_row * stride, shapes + at_row * SHAPE
    seed = output(tl.load(keys + at_row).to(tl.uint64, bitcast=True), tl.load(positions + at_row))
    inv_t, reach, temperature = tl.load(heat + at_row * 3), tl.load(heat + at_row * 3 + 1), tl.load(shape + 7)
    mode, top_k, forced = tl.load(plan + at_row * 3), tl.load(plan + at_row * 3 + 1), tl.load(plan + at_row * 3 + 2)
    part = tl.arange(0, PARTS)
    left, left_floats, there = ints + (at_row * parts + part) * INTS, floats + (at_row * parts + part) * FLOATS, part < parts
    tops = tl.load(left, there, other=NONE)
    most = tl.max(tops, 0)
    own_part = tl.min(tl.where((tops == most) & there, part, PARTS), 0)
    top = tl.min(tl.where(part == own_part, tl.load(left + 1, there, other=0), 0x7FFFFFFF), 0)
    runners_up = tl.where(part == own_part, tl.load(left + 2, there, other=NONE), tops)
    peak = value(most)
    apart = tl.where(there, value(tops).to(tl.float64) - peak.to(tl.float64), -float("inf"))
    raw_parts, mass_parts = tl.load(left_floats, there, other=0.0), tl.load(left_floats + 1, there, other=0.0)
    raw_mass = tl.sum(raw_parts * tl.exp(apart), 0)
    mass = tl.sum(mass_parts * tl.exp(apart * inv_t), 0)
    sound = (peak > -float("inf")) & (peak < float("inf"))
    token, margin, floor = top, tl.full((), float("inf"), tl.float64), tl.full((), -float("inf"), tl.float32)
    if mode == GREEDY:
        gap = peak.to(tl.float64) - value(tl.max(runners_up, 0)).to(tl.float64)
        margin = tl.where(vocab > 1, gap, float("inf"))
    elif sound:
        if mode == OPEN:
            if forced < 0:
                infinite = tl.full((), float("inf"), tl.float64)
                best, second, token = infinite, infinite, tl.full((), 0x7FFFFFFF, tl.int32)
                for which in tl.static_range(2):
                    index = tl.load(left + 3 + which, there, other=-1)
                    x = tl.load(row + index, index >= 0, other=-float("inf")).to(tl.float32)
                    scores = tl.where(index >= 0, _score(x, index, peak, inv_t, seed), infinite)
                    best, second, token = _two(scores, index, best, second, token)
                margin = tl.where(second < best * reach, tl.log(second / best) * temperature, float("inf"))
        else:
            widest = tl.load(shape + 1), tl.load(shape + 4)
            groups_of = groups + at_row * ((vocab + GROUP - 1) // GROUP)
            slack = 2.0 * tl.load(shape + 6).to(tl.float32)
            theta, safe = _bound(
                peak, mass, vocab, inv_t, slack, widest[0], widest[1], top_k, groups_of, rank, GROUP, GROUPS,
            )  # fmt: skip
            bars = bar_of(peak, tl.load(shape)), bar_of(peak, widest[0]), bar_of(peak, tl.load(shape + 2))
            weighs = (tl.load(shape + 3) < 1.0) & ((top_k <= 0) | (top_k >= vocab))
            own, own_at = kept + at_row * room_for, kept_at + at_row * room_for
            count, sums = _gather(row, vocab, own, own_at, room_for, peak, inv_t, theta, slack, bars, weighs, BLOCK)
            enough = tl.ceil(sums[1].to(tl.float64) * widest[1]).to(tl.int64)
            sure = (theta == safe) | (sums[3] >= tl.maximum(enough, 1))
            fits = sure & (count <= room_for)
            theta = tl.where(sure, theta, safe)
            source = row, own, own_at, tl.where(fits, count, 0), tl.where(fits, 0, vocab), theta
            drawn = _filtered(source, vocab, peak, inv_t, reach, seed, top_k, shape, sums, row, forced)
            token, margin, inner, floor = drawn
            wanted = tl.load(row + tl.where(forced >= 0, forced, token)).to(tl.float32)
            floor = tl.where(wanted >= floor, floor, -float("inf"))
            mass = tl.where(floor > -float("inf"), inner, mass)
    token = tl.where(forced >= 0, forced, token)
    margin = tl.where(forced >= 0, float("inf"), margin)
    below = tl.load(row + token).to(tl.float64) - peak.to(tl.float64)
    raw = below - tl.log(raw_mass)
    logprob = below * inv_t - tl.log(mass)
    if mode == GREEDY:
        logprob = tl.where(forced >= 0, raw, 0.0)
    tl.store(tokens + at_row, token)
    tl.store(values + at_row * 3, logprob.to(tl.float32))
    tl.store(values + at_row * 3 + 1, raw.to(tl.float32))
    tl.store(values + at_row * 3 + 2, margin.to(tl.float32))
