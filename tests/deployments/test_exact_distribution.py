"""What is sampled has the target's distribution, and drafts change neither it nor a single token."""

import numpy as np
import pytest
import torch
import torch_kernel
from scipy.stats import chisquare

from tailrace.deployments.vllm_exact import kernel_cpu
from tailrace.deployments.vllm_exact.sampler import verify

VOCAB, SAMPLES, DRAFTS = 12, 6000, 3
KERNELS = {
    "cpu": kernel_cpu.sample_rows,
    "torch": lambda a, *rest: torch_kernel.sample_rows(torch.from_numpy(a), *rest),
}
FILTERS = {
    "plain": {},
    "cool": {"temperature": 0.5},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 4, "temperature": 1.4},
    "min_p": {"min_p": 0.15, "temperature": 0.8},
    "all": {"min_p": 0.02, "top_k": 7, "top_p": 0.9, "temperature": 1.2},
}
TARGET = np.random.default_rng(3).standard_normal((DRAFTS + 1, VOCAB, VOCAB)).astype(np.float32)
"""TARGET[t, previous token] are the logits at position t: a small Markov chain stands for the model."""


def distribution(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """f64[V], by definition: sort, filter, renormalise after every filter (no equal logits here)."""
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0)
    p[np.argsort(-p)[top_k:] if top_k else []] = 0
    p /= p.sum()
    order = np.argsort(-p)
    p[order[np.cumsum(p[order]) - p[order] >= top_p]] = 0
    return p / p.sum()


def draw(kernel, logits, keys, positions, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    n = len(logits)
    columns = [np.full(n, v, np.float32) for v in (temperature, top_p)]
    columns += [np.full(n, top_k, np.int32), np.full(n, min_p, np.float32), np.full(n, -1, np.int32)]
    columns.append(np.zeros(n, np.float32))
    return KERNELS[kernel](np.ascontiguousarray(logits), keys, positions, *columns)[0]


def p_value(tokens, p):
    """Of a chi-square test that tokens come from p; 0 if an impossible one came."""
    counts = np.bincount(tokens, minlength=len(p))
    return 0.0 if counts[p == 0].any() else chisquare(counts[p > 0], p[p > 0] * len(tokens)).pvalue


def keys_of(seed):
    return np.random.default_rng(seed).integers(0, 2**64, SAMPLES, np.uint64)


def at(position):
    return np.full(SAMPLES, position, np.int64)


def generate(kernel, keys, filters):
    """i32[SAMPLES, DRAFTS + 1], one token at a time."""
    tokens, previous = [], np.zeros(SAMPLES, np.int64)
    for t in range(DRAFTS + 1):
        previous = draw(kernel, TARGET[t, previous], keys, at(t), **filters)
        tokens.append(previous)
    return np.stack(tokens, axis=1)


def generate_with_drafts(kernel, keys, filters, propose):
    """As `generate`, by verifying the drafts of `propose(position, n)`; also how many were accepted."""
    done, tokens, hits = np.zeros(SAMPLES, np.int64), np.full((SAMPLES, DRAFTS + 1), -1, np.int32), 0
    while (done <= DRAFTS).any():
        for t in np.unique(done[done <= DRAFTS]):
            who = np.nonzero(done == t)[0]
            drafts = propose(int(t), len(who))
            last = tokens[who, t - 1] if t else np.zeros(len(who), np.int64)
            context = np.concatenate([last[:, None], drafts], axis=1)
            columns = [
                draw(kernel, TARGET[t + j, context[:, j]], keys[who], at(t + j)[who], **filters)
                for j in range(context.shape[1])
            ]
            emitted, accepted = verify(np.stack(columns, axis=1), drafts, np.full(len(who), drafts.shape[1]))
            for j in range(emitted.shape[1]):
                live = emitted[:, j] >= 0
                tokens[who[live], t + j] = emitted[live, j]
            done[who] += accepted + 1
            hits += accepted.sum()
    return tokens, hits


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FILTERS)
def test_samples_have_the_targets_distribution(kernel, name):
    logits = np.repeat(TARGET[0, :1], SAMPLES, axis=0)
    tokens = draw(kernel, logits, keys_of(1), at(17), **FILTERS[name])
    assert p_value(tokens, distribution(TARGET[0, 0], **FILTERS[name])) > 1e-3
    other = distribution(TARGET[0, 0], **{**FILTERS[name], "temperature": 0.9 * FILTERS[name].get("temperature", 1.0)})
    assert p_value(tokens, other) < 1e-3  # the test is able to fail: a temperature 10 % lower is noticed


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
def test_drafts_change_no_token_and_no_distribution(name):
    keys = keys_of(2)
    rng = np.random.default_rng(4)
    favourites = np.array([1, 5, 5, 7, 9], np.int32)  # a biased proposer

    def propose(t, n):
        return rng.choice(favourites, (n, DRAFTS - t))

    plain = generate("cpu", keys, FILTERS[name])
    drafted, hits = generate_with_drafts("cpu", keys, FILTERS[name], propose)
    assert np.array_equal(plain, drafted)
    assert hits > 0
    previous = np.zeros(SAMPLES, np.int64)
    for t in range(DRAFTS + 1):
        p = np.array([distribution(TARGET[t, v], **FILTERS[name]) for v in range(VOCAB)])
        expected = p[previous]  # of each sample, given its own past
        z = ((plain[:, t, None] == np.arange(VOCAB)) - expected).sum(axis=0)
        spread = np.sqrt((expected * (1 - expected)).sum(axis=0))
        assert np.all(np.abs(z) <= 4.5 * spread), t
        previous = plain[:, t]


def test_verification_emits_the_draws_up_to_the_first_that_differs():
    drawn = np.array([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 9, 9]], np.int32)
    drafts = np.array([[4, 5], [4, 7], [8, 5], [-1, -1]], np.int32)
    emitted, accepted = verify(drawn, drafts, np.array([2, 2, 2, 0]))
    assert emitted.tolist() == [[4, 5, 6], [4, 5, -1], [4, -1, -1], [4, -1, -1]]
    assert accepted.tolist() == [2, 1, 0, 0]


def test_padding_is_never_an_accepted_draft():
    emitted, accepted = verify(np.array([[-1, 3, 3]], np.int32), np.array([[-1, 3]], np.int32), np.array([0]))
    assert accepted.tolist() == [0]
    assert emitted.tolist() == [[-1, -1, -1]]
