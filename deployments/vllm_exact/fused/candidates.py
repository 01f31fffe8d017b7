"""Candidates of a row with filters, in Triton: the logits that the filters may keep, gathered in a buffer.

Invariant: every token that the filters keep, or that comes close to that, is a candidate. If they do not fit in the
buffer, or a guess of their bound fails its test, the row itself is the source of candidates. Called by settle.py.
"""

import triton
import triton.language as tl

from tailrace.deployments.vllm_exact.fused.cuts import bar_of, heavy, ranked
from tailrace.deployments.vllm_exact.fused.noise import NONE, is_nan, units, value, weight


@triton.jit
def _gather(row, vocab, kept, kept_at, room_for, peak, inv_t, theta, slack, bars, weighs, BLOCK: tl.constexpr):
    """Moves the logits from theta on, and NaN, to the buffer, if they fit. Returns their number and units i64.

    Units: of the row from each of three bars on; from the second bar on, of the logits above theta + slack.
    """
    count, zero = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    sums = zero, zero, zero, zero
    for begin in range(0, vocab, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        own = tl.load(row + index, index < vocab, other=-float("inf"))
        x = own.to(tl.float32)
        passes = ((x >= theta) | is_nan(x)) & (index < vocab)
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
def candidates(
    row, vocab, kept, kept_at, room_for, peak, mass, inv_t, top_k, filters, groups, rank,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns (source, units of the row from each of three bars on): see `piece` and `floor_of`.

    `filters`: a row of `RowParameters.filters`. The source: pointers of row and buffer, how many are in the one or the
    other, and a lower bound of the candidates.
    """
    slack, widest, top_p = 2.0 * tl.load(filters + 6).to(tl.float32), tl.load(filters + 1), tl.load(filters + 4)
    theta, safe = _bound(peak, mass, vocab, inv_t, slack, widest, top_p, top_k, groups, rank, GROUP, GROUPS)
    bars = bar_of(peak, tl.load(filters)), bar_of(peak, widest), bar_of(peak, tl.load(filters + 2))
    weighs = (tl.load(filters + 3) < 1.0) & ((top_k <= 0) | (top_k >= vocab))
    count, sums = _gather(row, vocab, kept, kept_at, room_for, peak, inv_t, theta, slack, bars, weighs, BLOCK)
    enough = tl.ceil(sums[1].to(tl.float64) * top_p).to(tl.int64)
    sure = (theta == safe) | (sums[3] >= tl.maximum(enough, 1))
    fits = sure & (count <= room_for)
    source = row, kept, kept_at, tl.where(fits, count, 0), tl.where(fits, 0, vocab), tl.where(sure, theta, safe)
    return source, (sums[0], sums[1], sums[2])
