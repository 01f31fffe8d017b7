"""Both kernels against a float64 reference written for clarity, and the laws of `sample_rows`."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_kernel

from tailrace.deployments.vllm_exact import gumbel_rng, kernel_cpu
from tailrace.deployments.vllm_exact.shared_noise import draft_on_host

KERNELS = {
    "cpu": kernel_cpu.sample_rows,
    "torch": lambda a, *rest: torch_kernel.sample_rows(torch.from_numpy(a), *rest),
}
KINDS = {
    "keys": np.uint64, "positions": np.int64, "temperature": np.float32, "top_p": np.float32,
    "top_k": np.int32, "min_p": np.float32, "forced": np.int32, "tolerance": np.float32,
}  # fmt: skip
Rows = namedtuple("Rows", ["logits", *KINDS])


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """Small tensors on a busy machine: waiting for a second thread costs far more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(logits, keys=0, positions=0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, forced=-1, tolerance=0.0):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    given = (keys, positions, temperature, top_p, top_k, min_p, forced, tolerance)
    parts = zip(given, KINDS.values(), strict=True)
    return Rows(logits, *(np.broadcast_to(np.asarray(v, k), len(logits)).copy() for v, k in parts))


def some_rows(seed, vocab, count=12):
    """Rows of every kind: flat and peaked, with ties, masked tokens, every filter alone and together, replays."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((count, vocab)) * rng.choice([0.0, 0.3, 1.0, 3.0, 10.0], (count, 1))
    logits[::3] = np.round(logits[::3] * 2) / 2
    logits[::4, rng.random(vocab) < 0.3] = -np.inf
    logits[:, rng.integers(vocab)] = 0.5
    return rows(
        logits,
        keys=rng.integers(0, 2**64, count, np.uint64),
        positions=rng.integers(0, 10**6, count),
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.7], count),
        top_p=rng.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.999], count),
        top_k=rng.choice([0, 0, 1, 2, 10, 300, vocab, 2 * vocab], count),
        min_p=rng.choice([0.0, 0.0, 1e-4, 0.02, 0.5, 1.0], count),
        forced=rng.choice([-1, -1, -1, 3], count),
    )


def kept(logits, temperature, top_p, top_k, min_p):
    """(tempered probabilities, which tokens the filters keep), each filter on what the one before left."""
    x = (logits.astype(np.float64) - logits.max()) / np.float64(temperature)
    p = np.exp(x)
    keep = (p >= np.float64(min_p) * p.max()) & (logits > -np.inf)
    if top_k and top_k < keep.sum():
        keep &= logits >= np.sort(logits[keep])[-top_k]
    if top_p < 1:
        q = np.where(keep, p, 0) / p[keep].sum()
        keep &= np.array([q[logits > value].sum() < top_p for value in logits])
    return p, keep


def reference(row):
    logits = row.logits.astype(np.float64)
    raw = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    if row.temperature == 0:
        token = row.forced if row.forced >= 0 else int(np.argmax(logits))
        return token, raw[token] if row.forced >= 0 else 0.0, raw[token]
    p, keep = kept(row.logits, row.temperature, row.top_p, row.top_k, row.min_p)
    if row.forced >= 0:
        token = row.forced
        keep = keep if keep[token] else np.ones_like(keep)
    else:
        e = np.array([gumbel_rng.exponential(int(row.keys), int(row.positions), i) for i in range(len(logits))])
        token = int(np.argmin(np.divide(e, p, out=np.full(len(e), np.inf), where=keep & (p > 0))))
    with np.errstate(divide="ignore"):
        return token, np.log(p[token] / p[keep].sum()), raw[token]


def each(given):
    return [Rows(*(column[i] for column in given)) for i in range(len(given.logits))]


def close(a, b, tolerance=1e-5):
    return np.all((a == b) | (np.abs(np.subtract(a, b, where=np.isfinite(b), out=np.zeros(len(b)))) < tolerance))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("vocab", [1, 7, 513, 1100])
def test_a_kernel_is_the_reference(kernel, vocab):
    for seed in range(6):
        given = some_rows(seed, max(vocab, 4) if vocab > 1 else 1, count=8)
        given = given if vocab > 1 else given._replace(forced=np.full(8, -1, np.int32))
        tokens, logprobs, raw, _ = KERNELS[kernel](*given)
        want = [reference(row) for row in each(given)]
        assert tokens.tolist() == [w[0] for w in want]
        assert close(logprobs, np.array([w[1] for w in want]))
        assert close(raw, np.array([w[2] for w in want]))


@pytest.mark.parametrize("vocab", [12, 511, 5000, 49152])
def test_the_kernels_agree(vocab):
    for seed in range(100, 104 if vocab < 49152 else 102):
        given = some_rows(seed, vocab, count=24 if vocab < 49152 else 8)
        on_cpu, in_torch = (kernel(*given) for kernel in KERNELS.values())
        assert on_cpu[0].tolist() == in_torch[0].tolist()
        assert close(on_cpu[1], in_torch[1].astype(np.float64))
        assert close(on_cpu[2], in_torch[2].astype(np.float64))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_does_not_depend_on_its_neighbours(kernel):
    given = some_rows(5, 3000, count=20)
    together = KERNELS[kernel](*given)
    for i in (0, 7, 19):
        alone = KERNELS[kernel](*(column[i : i + 1] for column in given))
        assert alone[0][0] == together[0][i]
    back = KERNELS[kernel](*(np.ascontiguousarray(column[::-1]) for column in given))
    assert back[0][::-1].tolist() == together[0].tolist()
    if kernel == "cpu":  # bit by bit; torch may reduce one row otherwise than many
        assert [c[::-1].tobytes() for c in back] == [c.tobytes() for c in together]


@pytest.mark.parametrize("kernel", KERNELS)
def test_greedy_takes_the_smallest_of_equal_tokens(kernel):
    logits = np.zeros((3, 2000), np.float32)
    logits[0, [1500, 700, 1999]] = 2.0
    logits[1] = -0.0
    logits[1, 900] = 0.0  # equal to -0.0, so token 0 wins
    logits[2] = -np.inf
    logits[2, 1234] = -5.0
    tokens, logprobs, raw, _ = KERNELS[kernel](*rows(logits, temperature=0.0))
    assert tokens.tolist() == [700, 0, 1234]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]
    assert raw[2] == 0.0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.01}, {"min_p": 1.0}])
def test_tied_tokens_are_kept_together(kernel, filters):
    logits = np.full((400, 600), 0.0, np.float32)
    logits[:, [3, 77, 599]] = 1.0
    tokens, logprobs, *_ = KERNELS[kernel](*rows(logits, keys=np.arange(400), **filters))
    assert set(tokens) == {3, 77, 599}
    assert close(logprobs, np.full(400, -np.log(3)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_vocabulary_of_equal_logits_is_cut_nowhere(kernel):
    tokens, logprobs, *_ = KERNELS[kernel](*rows(np.zeros((64, 5000)), keys=np.arange(64), top_p=0.5, top_k=10))
    assert len(set(tokens)) > 50
    assert close(logprobs, np.full(64, -np.log(5000)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_forced_token_outside_the_filters_is_scored_without_them(kernel):
    given = rows([[3.0, 2.0, 1.0]] * 3, forced=[0, 2, -1], top_k=1)
    tokens, logprobs, raw, _ = KERNELS[kernel](*given)
    assert tokens.tolist() == [0, 2, 0]
    assert close(logprobs, np.array([0.0, raw[1], 0.0], np.float64))
    assert close(raw, np.array([-0.40760596, -2.40760596, -0.40760596]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_forced_token_beyond_the_vocabulary_is_refused(kernel):
    with pytest.raises(ValueError, match="forced token 3 is outside the vocabulary of 3"):
        KERNELS[kernel](*rows([[1.0, 2.0, 3.0]], forced=3))


def test_a_replay_inside_its_prompt_has_no_given_draft_yet():
    """vLLM drafts after each piece of a prompt that is longer than a step."""
    replay = {"prompt_tokens": 10, "forced": [2, 1], "eos": 0}
    given = rows([[1.0, 2.0, 3.0, 9.0]] * 5, temperature=0.0)
    columns = {name: getattr(given, name) for name in KINDS if name not in ("positions", "forced")}
    batch = SimpleNamespace(slots=np.arange(5), replays=dict.fromkeys(range(4), replay), columns={})
    batch.columns = {"key" if name == "keys" else name: values for name, values in columns.items()}
    sampler, places = SimpleNamespace(batch=lambda count: batch), torch.tensor([4, 9, 10, 12, 4])
    drafts = draft_on_host(sampler, kernel_cpu.sample_rows, torch.from_numpy(given.logits), places)
    assert drafts.tolist() == [3, 3, 2, 0, 3]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_logits_that_are_no_distribution_are_seen_in_the_logprobs(kernel, bad):
    logits = np.zeros((2, 700), np.float32)
    logits[0, 600] = bad
    for filters in ({}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}):
        tokens, _, raw, _ = KERNELS[kernel](*rows(logits, **filters))
        assert np.isnan(raw).tolist() == [True, False]
        assert 0 <= tokens[0] < 700


def rows_without_candidates(vocab=700):
    """Rows that rules have left without a token, at several temperatures and filters; the last one has a token."""
    heats = np.array([0.0, 0.0, 1e-4, 0.5, 1.0, 1.0, 3e38, 1.0], np.float32)
    logits = np.full((len(heats), vocab), -np.inf, np.float32)
    logits[-1, 5] = 1.0
    return rows(logits, temperature=heats, top_k=[0, 3, 0, 0, 0, 3, 0, 3], top_p=[1, 0.5, 1, 1, 1, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_without_a_candidate_has_no_logprob_at_any_temperature(kernel):
    given = rows_without_candidates()
    tokens, logprobs, *_ = KERNELS[kernel](*given)
    assert np.isnan(logprobs).tolist() == [True] * (len(logprobs) - 1) + [False]
    assert ((tokens >= 0) & (tokens < given.logits.shape[1])).all()


def extreme_rows(rng, vocab, count=24):
    """Rows of absurd values: each parameter at and beyond its edges, logits with NaN, infinities and denormals."""
    huge, tiny = np.float32(3.4e38), np.float32(1e-45)
    logits = (rng.standard_normal((count, vocab)) * 3).astype(np.float32)
    for row in logits:
        for _ in range(rng.integers(0, 4)):
            value = rng.choice([np.nan, -np.nan, np.inf, -np.inf, huge, -huge, tiny, 0.0])
            row[rng.random(vocab) < rng.choice([0.01, 0.3, 1.0])] = value
    return rows(
        logits,
        keys=rng.integers(0, 2**64, count, np.uint64),
        positions=rng.choice([0, 1, 2**31, 2**62], count),
        temperature=rng.choice([0.0, tiny, 1e-6, 1.1e-5, 1.0, 1e30, huge, np.inf, np.nan], count),
        top_p=rng.choice([tiny, 1e-30, 0.5, 1.0, 2.0, np.nan, 0.0], count),
        top_k=rng.choice([0, 1, 2, 2**31 - 1, -1, -(2**31)], count),
        min_p=rng.choice([0.0, tiny, 1e-30, 0.5, 1.0, 2.0, np.inf, np.nan], count),
        forced=rng.choice([-1, -1, 0, vocab - 1], count),
        tolerance=rng.choice([0.0, tiny, 1e-3, 1.0, huge, np.inf, np.nan], count),
    )


@pytest.mark.parametrize("vocab", [1, 2, 130, 1025])
@pytest.mark.parametrize("seed", range(8))
def test_absurd_values_return_a_token_of_the_vocabulary(seed, vocab):
    """The kernel writes where a token is: one outside would be memory of others. A loop without end would hang here."""
    with np.errstate(all="ignore"):
        tokens, *_ = kernel_cpu.sample_rows(*extreme_rows(np.random.default_rng(seed), vocab))
    assert ((tokens >= 0) & (tokens < vocab)).all()
