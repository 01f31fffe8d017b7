"""Candidates of a row with filters, in Triton: the logits that the filters may keep, gathered in a buffer.

Invariant: every token that the filters keep, or that comes close to that, is a candidate. If they do not fit in the
buffer, or a guess of their bound fails its test, the row itself is the source of candidates. Called by settle.py.
"""

import triton
import triton.language as tl

from tailrace.deployments.vllm_exact.fused.cuts import bar_of
from tailrace.deployments.vllm_exact.fused.noise import is_nan, units
from tailrace.deployments.vllm_exact.fused.scan import BINS, FLOATS


@triton.jit
def _gather(row, vocab, kept, kept_at, room_for, peak, inv_t, theta, slack, bars, weighs, BLOCK: tl.constexpr):
    """Moves the logits from theta on, and NaN, to the buffer, if they fit. Returns numbers i32 and units i64.

    Numbers: of those, and of the logits above theta + slack. Units: of the row from each of three bars on; from the
    second bar on, of the logits above theta + slack.
    """
    count, above, zero = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
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
        above += tl.sum((x > theta + slack).to(tl.int32), 0)
        if weighs:
            some = tl.where(index < vocab, units(x, peak, -float("inf"), inv_t), 0)
            sums = (
                sums[0] + tl.sum(tl.where(x >= bars[0], some, 0), 0),
                sums[1] + tl.sum(tl.where(x >= bars[1], some, 0), 0),
                sums[2] + tl.sum(tl.where(x >= bars[2], some, 0), 0),
                sums[3] + tl.sum(tl.where((x >= bars[1]) & (x > theta + slack), some, 0), 0),
            )
    tl.debug_barrier()  # the buffer is read by other threads than those that filled it
    return count, above, sums


@triton.jit
def _counted(peak, per_logit, left_floats, counts, parts):
    """Returns i32[BINS]: the row's logits by their distance from the peak, bin b: (b to b + 2) / per_logit below it."""
    bins = tl.arange(0, BINS)
    found = tl.full((BINS,), 0, tl.int32)
    for part in range(0, parts):
        head = tl.load(left_floats + part * FLOATS + 2).to(tl.float32)
        shift = tl.floor(tl.minimum(tl.maximum((peak - head) * per_logit, -1.0 * BINS), 1.0 * BINS)).to(tl.int32)
        own = bins - shift
        found += tl.load(counts + part * BINS + own, (own >= 0) & (own < BINS), other=0)
    return found


@triton.jit
def _bound(peak, mass, inv_t, per_logit, slack, drop, top_p, limits, top_k, left_floats, counts, parts):
    """Returns (theta, safe) f32: a logit below every token that the widest filters may keep, or come close to that.

    `safe` is surely so: min_p's bar. theta is a guess from the counts of scan.py, to be tested by the logits above it:
    for top_k, more than that many are above; for top_p, all below weigh less than is left out.
    """
    safe = bar_of(peak, drop) - slack
    theta = safe
    if (per_logit > 0.0) & (limits | (top_p < 1.0)):
        found, bins = _counted(peak, per_logit, left_floats, counts, parts), tl.arange(0, BINS)
        if limits:
            first = tl.min(tl.where(tl.cumsum(found, 0) > top_k, bins + 2, BINS + 2), 0)
        else:
            p = found.to(tl.float32) * tl.exp(bins.to(tl.float32) * (-1.0 * inv_t.to(tl.float32) / per_logit))
            below = tl.cumsum(p, 0, reverse=True)
            first = tl.min(tl.where(below <= ((1.0 - top_p) * 0.99 * mass).to(tl.float32), bins + 1, BINS + 2), 0)
        if first < BINS + 2:
            theta = tl.maximum(theta, peak - first.to(tl.float32) / per_logit - slack)
    return theta, safe


@triton.jit
def candidates(
    row, vocab, kept, kept_at, room_for, peak, mass, inv_t, per_logit, top_k, filters, left_floats, counts, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns (source, units of the row from each of three bars on): see `piece` and `floor_of`.

    `filters`: a row of `RowParameters.filters`. The source: pointers of row and buffer, how many are in the one or the
    other, and a lower bound of the candidates.
    """
    slack, widest, top_p = 2.0 * tl.load(filters + 6).to(tl.float32), tl.load(filters + 1), tl.load(filters + 4)
    limits = (top_k > 0) & (top_k < vocab)
    theta, safe = _bound(
        peak, mass, inv_t, per_logit, slack, widest, top_p, limits, top_k, left_floats, counts, parts
    )  # fmt: skip
    bars = bar_of(peak, tl.load(filters)), bar_of(peak, widest), bar_of(peak, tl.load(filters + 2))
    weighs = (tl.load(filters + 3) < 1.0) & (limits == 0)
    count, above, sums = _gather(row, vocab, kept, kept_at, room_for, peak, inv_t, theta, slack, bars, weighs, BLOCK)
    enough = tl.ceil(sums[1].to(tl.float64) * top_p).to(tl.int64)
    sure = (theta == safe) | tl.where(limits, above > top_k, sums[3] >= tl.maximum(enough, 1))
    fits = sure & (count <= room_for)
    source = row, kept, kept_at, tl.where(fits, count, 0), tl.where(fits, 0, vocab), tl.where(sure, theta, safe)
    return source, (sums[0], sums[1], sums[2])
