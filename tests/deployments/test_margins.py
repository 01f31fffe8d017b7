"""Margins of draws against a float64 reference, at the edges of filters too; steps that end at a close call."""

from functools import cache

import numpy as np
import pytest
import test_kernels
from test_kernels import KERNELS, each, rows

from tailrace.deployments.vllm_exact import gumbel_rng
from tailrace.deployments.vllm_exact.kernel_cpu import WINDOW
from tailrace.deployments.vllm_exact.sampler import cut_at

TOLERANCE = 0.02


@cache
def log_noise(key: int, position: int, vocab: int) -> np.ndarray:
    """f64[vocab], by the reference in plain Python: the rows of all filters and temperatures have the same."""
    return np.log([gumbel_rng.exponential(key, position, i) for i in range(vocab)])


def scores(row):
    """f64[V]: the perturbed scores logit / T + Gumbel, of which the largest wins."""
    noise = log_noise(int(row.keys), int(row.positions), len(row.logits))
    return row.logits.astype(np.float64) / np.float64(row.temperature) - noise


def reference(row):
    """The margin in logits, with every token that may be kept as a rival; 0 if the filters may drop the winner."""
    if row.forced >= 0:
        return np.inf
    if row.temperature == 0:
        second, first = np.sort(row.logits.astype(np.float64))[-2:]
        return first - second
    by, values = row.tolerance / row.temperature, scores(row)
    token = int(np.argmax(np.where(kept(row, 0.0), values, -np.inf)))
    if not certain(row, token, by) and row.logits[token] < floor_of(row, -by):
        return 0.0
    rivals = kept(row, by)
    rivals[token] = False
    best = values[rivals].max() if rivals.any() else -np.inf
    return max(0.0, values[token] - best) * row.temperature


def certain(row, token, by):
    """Whether noise of the tolerance cannot make the filters drop the token."""
    floor, own, edge = floor_of(row, 0.0), row.logits[token], np.float32(row.logits[token] - row.tolerance)
    if floor == -np.inf:
        return True
    p = np.exp((row.logits - row.logits.max()) / row.temperature, dtype=np.float64)
    below = (row.logits > floor) & (row.logits <= edge)
    inside = p[token] + p[below].sum() > 2 * by * p[row.logits >= floor].sum() / row.top_p
    return own > floor + np.float32(2 * row.tolerance) and (row.top_p >= 1 or inside)


def floor_of(row, by):
    """The smallest logit that filters widened by `by` keep, less the tolerance; narrowed if negative. -inf: all."""
    top_p = np.clip(row.top_p + by, 1e-6, 1.0) if row.top_p < 1 else 1.0
    min_p = min(1.0, row.min_p * np.exp(-by))
    _, keep = test_kernels.kept(row.logits, row.temperature, top_p, row.top_k, min_p)
    bar = row.logits.max() + np.log(np.float64(min_p)) * row.temperature if min_p else -np.inf
    limited = top_p < 1 or 0 < row.top_k < ((row.logits >= bar) & (row.logits > -np.inf)).sum()
    return (row.logits[keep].min() if limited else bar) - by * row.temperature


def kept(row, by):
    """The tokens that filters widened by `by` keep, or with a logit within the tolerance of those."""
    return (row.logits >= floor_of(row, by)) & (row.logits > -np.inf)


def drawn(kernel, given):
    return KERNELS[kernel](*given)[3]


def agree(got, want, beyond):
    """Equal, or both above `beyond`."""
    return np.all((np.abs(got - want) < 1e-5) | ((got >= beyond - 1e-5) & (want >= beyond - 1e-5)) | (got == want))


@pytest.mark.slow
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}]
)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.6])
def test_a_margin_is_the_distance_to_the_next_token_that_may_win(filters, temperature):
    rng = np.random.default_rng(3)
    keys, positions = rng.integers(0, 2**64, 400, np.uint64), rng.integers(0, 999, 400)
    usual = {"keys": keys, "positions": positions, "temperature": temperature, "tolerance": TOLERANCE}
    given = rows(rng.standard_normal((400, 40)), **usual, **filters)
    with np.errstate(invalid="ignore", divide="ignore"):
        want = np.array([reference(row) for row in each(given)])
        # The edges of filters are looked at within the tolerance alone, all else within the CPU's window.
        beyond = TOLERANCE if filters else WINDOW * (temperature or np.inf)
        for kernel in KERNELS:
            assert agree(drawn(kernel, given), want, beyond), kernel
    assert (want < beyond).sum() > 1


def test_filters_add_close_calls_that_the_kept_tokens_do_not_show():
    """With logits 1, 0.999 and -5, top_k 1 keeps the first alone; noise may swap them, and the second may win."""
    given = rows([[1.0, 0.999, -5.0]] * 300, keys=np.arange(300), top_k=1, tolerance=0.01)
    for kernel in KERNELS:
        assert (drawn(kernel, given) == 0.0).all()  # the winner is at the edge
        assert np.isinf(drawn(kernel, given._replace(tolerance=np.zeros(300, np.float32)))).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_ties_infinities_and_replays(kernel):
    logits = np.full((4, 700), -np.inf, np.float32)
    logits[0, [3, 600]] = 2.0  # greedy, equal
    logits[1, 5] = 2.0  # one token alone
    logits[2, 5] = 2.0
    logits[3, [3, 600]] = 2.0  # replayed
    given = rows(logits, temperature=[0.0, 0.0, 1.0, 1.0], forced=[-1, -1, -1, 3], tolerance=0.01)
    margins = drawn(kernel, given)
    assert margins[0] == 0.0 and np.isinf(margins[1:]).all()


def test_the_kernels_agree_on_close_calls():
    given = test_kernels.some_rows(11, 900, count=400)._replace(tolerance=np.full(400, TOLERANCE, np.float32))
    on_cpu, in_torch = (drawn(kernel, given) for kernel in KERNELS)
    assert ((on_cpu < TOLERANCE) == (in_torch < TOLERANCE)).all() and 0 < (on_cpu < TOLERANCE).sum() < 400


def test_a_step_ends_at_its_first_close_call():
    emitted = np.array([[4, 5, 6], [4, 5, -1], [4, 5, 6], [7, -1, -1]], np.int32)
    close = np.array([[0, 1, 1], [0, 0, 1], [0, 0, 0], [1, 1, 0]], bool)
    cut, rows_of, at = cut_at(emitted, close)
    assert cut.tolist() == [[4, 5, -1], [4, 5, -1], [4, 5, 6], [7, -1, -1]]
    assert (rows_of.tolist(), at.tolist()) == ([0, 3], [1, 0])
