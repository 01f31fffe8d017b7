"""The first launch: one read of the logits; each program looks at SPAN logits of one row and leaves a few numbers.

It leaves the largest and the second largest logit, the masses at temperature 1 and T, the two best tokens of the
race (rows without filters), and how many logits are how far below the peak (rows with top_k or top_p).
Invariant: they depend on the row alone.
The race keeps a token by its logit and the logarithm of its noise, so no peak need be known: a score is compared
relative to the largest logit so far. A float32 bound chooses the blocks that float64 looks at, as in kernel_cpu.py.
Called by kernel.py; settle.py reads these numbers.
"""

import triton
import triton.language as tl

from tailrace.deployments.vllm_exact.fused.noise import NONE, log_exponential, order, output, room, value, weight

GREEDY, OPEN, FILTERED = (tl.constexpr(mode) for mode in (0, 1, 2))
MOST_NOISE = tl.constexpr(36.8)  # no unit exponential variate of 52 bits is larger
SLACK = tl.constexpr(1.0002)  # as in kernel_cpu.py; `weight` is right within 3e-5
INTS, FLOATS = tl.constexpr(5), tl.constexpr(3)
BINS, HEADROOM = tl.constexpr(256), tl.constexpr(64)  # of the counts; for logits above those of the first look


@triton.jit
def _take(scores, x, index, at):
    """Returns (score f64, logit f32) of the token `at`."""
    here = index == at
    return tl.min(tl.where(here, scores, float("inf")), 0), tl.sum(tl.where(here, x, 0.0), 0)


@triton.jit
def _race(x, index, passed, hashed, peak, inv_t, held):
    """Returns `held` after these tokens: (log noise f64, logit f32, token i32) of the best and of the second."""
    log_noise = log_exponential(hashed)
    scores = tl.where(passed, log_noise - (x.to(tl.float64) - peak.to(tl.float64)) * inv_t, float("inf"))
    best = tl.min(scores, 0)
    at = tl.min(tl.where(scores == best, index, 0x7FFFFFFF), 0)
    scores = tl.where(index == at, float("inf"), scores)
    second = tl.min(scores, 0)
    at_second = tl.min(tl.where((scores == second) & (index != at), index, 0x7FFFFFFF), 0)
    noise, logit = _take(log_noise, x, index, at)
    noise_2, logit_2 = _take(log_noise, x, index, at_second)
    noise_2 = tl.where(second < float("inf"), noise_2, float("inf"))
    held_noise, held_logit, held_at, held_noise_2, held_logit_2, _ = held
    held_best = held_noise - (held_logit.to(tl.float64) - peak.to(tl.float64)) * inv_t
    held_second = held_noise_2 - (held_logit_2.to(tl.float64) - peak.to(tl.float64)) * inv_t
    if best < held_best:
        if second < held_best:
            held = noise, logit, at, noise_2, logit_2, at_second
        else:
            held = noise, logit, at, held_noise, held_logit, held_at
    elif best < held_second:
        held = held_noise, held_logit, held_at, noise, logit, at
    return held


@triton.jit
def _binned(x, head, per_logit):
    """Returns i32[BINS]: the number of logits by their distance below `head`; those above it are in the first bin."""
    apart = (head - x) * per_logit
    apart = tl.where(apart > 0.0, apart, 0.0)
    return tl.histogram(tl.where(apart < BINS - 1.0, apart, BINS - 1.0).to(tl.int32), BINS)


@triton.jit
def scan(
    logits, stride, vocab, keys, positions, heat, plan, ints, floats, counts,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """logits [n, vocab], rows `stride` apart; keys, positions i64[n]; heat, plan: see `RowParameters`."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    seed = output(tl.load(keys + row).to(tl.uint64, bitcast=True), tl.load(positions + row))
    inv_t, reach = tl.load(heat + row * 3), tl.load(heat + row * 3 + 1)
    mode, forced = tl.load(plan + row * 3), tl.load(plan + row * 3 + 2)
    races, per_logit = (mode == OPEN) & (forced < 0), tl.load(heat + row * 3 + 2).to(tl.float32)
    tempered = (mode != GREEDY) & (inv_t != 1.0)
    top, top_at, second = tl.full((), NONE, tl.int32), tl.full((), 0x7FFFFFFF, tl.int32), tl.full((), NONE, tl.int32)
    raw_mass, mass = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    peak, nothing = tl.full((), -float("inf"), tl.float32), tl.full((), float("inf"), tl.float64)
    zero, nowhere = tl.full((), 0.0, tl.float32), tl.full((), -1, tl.int32)
    held = nothing, zero, nowhere, nothing, zero, nowhere
    head, bins = zero, tl.full((BINS,), 0, tl.int32)
    for begin in range(part * SPAN, tl.minimum(part * SPAN + SPAN, vocab), BLOCK):
        index = begin + tl.arange(0, BLOCK)
        here = index < vocab
        x = tl.load(logits + row * stride + index, here, other=-float("inf")).to(tl.float32)
        key = tl.where(here, order(x), NONE)
        most = tl.max(key, 0)
        at = tl.min(tl.where((key == most) & here, index, 0x7FFFFFFF), 0)
        rest = tl.max(tl.where(index == at, NONE, key), 0)
        second = tl.maximum(tl.maximum(second, rest), tl.minimum(most, top))
        top_at = tl.where((most > top) | (top_at == 0x7FFFFFFF), at, top_at)
        before, top = peak, tl.maximum(most, top)
        peak = value(top)
        p = weight(x, peak, 1.0)
        raw_mass = raw_mass * weight(before, peak, 1.0).to(tl.float64) + tl.sum(p, 0).to(tl.float64)
        if tempered:
            p = weight(x, peak, inv_t.to(tl.float32))
            mass = mass * weight(before, peak, inv_t.to(tl.float32)).to(tl.float64) + tl.sum(p, 0).to(tl.float64)
        if races:
            hashed = output(seed, index)
            noise, logit, _, _, _, _ = held
            best = tl.exp(noise - (logit.to(tl.float64) - peak.to(tl.float64)) * inv_t)
            bound = (tl.minimum(best, MOST_NOISE) * reach * SLACK).to(tl.float32)
            passed = (room(hashed) < bound * p) & here & (x > -float("inf"))
            if tl.max(passed.to(tl.int32), 0) > 0:
                held = _race(x, index, passed, hashed, peak, inv_t, held)
        if per_logit > 0.0:
            head = tl.where(begin == part * SPAN, peak + HEADROOM / per_logit, head)
            bins += _binned(x, head, per_logit)
    place = row * parts + part
    numbers = top, top_at, second, held[2], held[5]
    for which in tl.static_range(5):
        tl.store(ints + place * INTS + which, numbers[which])
    tl.store(floats + place * FLOATS, raw_mass)
    tl.store(floats + place * FLOATS + 1, tl.where(tempered, mass, raw_mass))
    tl.store(floats + place * FLOATS + 2, head.to(tl.float64))
    if per_logit > 0.0:
        tl.store(counts + place * BINS + tl.arange(0, BINS), bins)
