"""The fused kernel of GPUs, under Triton's interpreter: tokens, logprobs and margins of kernel_cpu.py; its bytes.

Compiled as well, for GPUs that are not here: to machine code, with float64 operations that nothing has fused.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import test_kernels
import torch
from test_kernels import _one_torch_thread, close, rows  # noqa: F401 - a fixture

from tailrace.deployments.vllm_exact import gumbel_rng, kernel_cpu
from tailrace.lab.benchmarks.engine import interpreted, sampler_triton

LIKE = ("tokens_differ", "not_numbers_differ", "close_calls_differ")
LOGPROB_BOUND = 1e-5
"""In nats. float32 sums of a row and a float32 exponential, good to 3e-5 of the smallest weights, leave less."""


@pytest.fixture(scope="module")
def kernel():
    yield interpreted.interpreted()
    interpreted.forget()


def draw(kernel, given, dtype=torch.float32):
    return kernel.sample_rows(torch.from_numpy(given.logits).to(dtype), *given[1:])


def on_cpu(given, dtype=torch.float32):
    return kernel_cpu.sample_rows(torch.from_numpy(given.logits).to(dtype).float().numpy(), *given[1:])


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, pytest.param(48, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1, "float32"), (2, "bfloat16"), (64, "float32"), (65, "float16"), (200, "bfloat16"), (1025, "float32")],
)
def test_rows_of_every_kind_are_those_of_the_cpu(kernel, vocab, dtype, count):
    rng = np.random.default_rng(vocab)
    logits = sampler_triton.some_logits(rng, vocab, count, getattr(torch, dtype))
    found = sampler_triton.differences(kernel, logits, sampler_triton.some_columns(rng, vocab, count))
    assert [found[name] for name in LIKE] == [0, 0, 0]
    assert found["logprob_diff"] < LOGPROB_BOUND and found["margin_diff"] < 1e-5


@pytest.mark.parametrize(
    ("name", "factor", "seen_in"),
    [("keys", 3, "tokens_differ"), ("temperature", 1.001, "logprob_diff"), ("tolerance", 0, "close_calls_differ")],
)
def test_a_difference_would_be_found(name, factor, seen_in):
    """The comparison is not blind: other keys, temperatures or tolerances show."""
    rng = np.random.default_rng(0)
    logits, columns = sampler_triton.some_logits(rng, 200, 40, torch.float32), sampler_triton.some_columns(rng, 200, 40)

    class Other:
        @staticmethod
        def sample_rows(logits, **given):
            other = (given[name] * np.asarray(factor, given[name].dtype)).astype(given[name].dtype)
            return kernel_cpu.sample_rows(logits.numpy(), **(given | {name: other}))

    assert sampler_triton.differences(Other, logits, columns)[seen_in] > 0


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.6}, {"top_k": 40}, {"top_p": 0.9, "top_k": 300}])
def test_a_row_of_several_programs(kernel, filters):
    """Two rows of two programs: flat, so that not all candidates fit in the buffer, and as models make them."""
    rng = np.random.default_rng(5)
    logits = np.stack([rng.standard_normal(20_001), sampler_triton.like_a_model(20_001)[0].numpy()])
    given = rows(logits, keys=[3, 4], temperature=0.9, tolerance=2e-4, **filters)
    cpu, fused = on_cpu(given), draw(kernel, given)
    assert cpu[0].tolist() == fused[0].tolist()
    assert close(fused[1], cpu[1].astype(np.float64)) and close(fused[2], cpu[2].astype(np.float64))


def test_a_row_does_not_depend_on_its_neighbours(kernel):
    given = test_kernels.some_rows(5, 700, count=8)
    together = draw(kernel, given)
    back = draw(kernel, type(given)(*(np.ascontiguousarray(column[::-1]) for column in given)))
    assert [column[::-1].tobytes() for column in back] == [column.tobytes() for column in together]


@pytest.mark.slow
def test_margins_are_measured_in_the_window_of_the_cpu(kernel):
    from tailrace.deployments.vllm_exact.fused import parameters

    assert parameters.WINDOW == kernel_cpu.WINDOW
    rng = np.random.default_rng(9)
    given = rows(rng.standard_normal((60, 50)), keys=rng.integers(0, 2**64, 60, np.uint64), temperature=1.3)
    cpu, fused = on_cpu(given)[3], draw(kernel, given)[3]
    assert 5 < np.isfinite(cpu).sum() < 60
    assert (np.isfinite(cpu) == np.isfinite(fused)).all() and np.allclose(cpu, fused, atol=1e-6)


def test_the_smallest_index_wins_a_tie_of_greedy_rows(kernel):
    logits = np.zeros((3, 300), np.float32)
    logits[0, [250, 70, 299]] = 2.0
    logits[1], logits[1, 90] = -0.0, 0.0  # equal, so token 0 wins
    logits[2], logits[2, 123] = -np.inf, -5.0
    tokens, logprobs, raw, margins = draw(kernel, rows(logits, temperature=0.0))
    assert tokens.tolist() == [70, 0, 123] and logprobs.tolist() == [0.0] * 3 and raw[2] == 0.0
    assert margins[:2].tolist() == [0.0, 0.0] and np.isinf(margins[2])


def test_a_row_without_a_candidate_has_no_logprob_at_any_temperature(kernel):
    given = test_kernels.rows_without_candidates(vocab=300)
    tokens, logprobs, *_ = draw(kernel, given)
    assert np.isnan(logprobs).tolist() == [True] * (len(logprobs) - 1) + [False]
    assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_absurd_values_return_a_token_of_the_vocabulary(kernel, seed):
    with np.errstate(all="ignore"):
        tokens, *_ = draw(kernel, test_kernels.extreme_rows(np.random.default_rng(seed), 130))
    assert ((tokens >= 0) & (tokens < 130)).all()


def test_a_forced_token_beyond_the_vocabulary_is_refused(kernel):
    with pytest.raises(ValueError, match="forced token 3 is outside the vocabulary of 3"):
        draw(kernel, rows([[1.0, 2.0, 3.0]], forced=3))


def test_the_noise_is_the_integers_of_the_reference(kernel):
    """A flat row without filters: its winner has the least exponential of all, by the reference in plain Python."""
    given = rows(np.zeros((6, 90)), keys=[0, 1, 2**63, 2**64 - 1, 7, 8], positions=[0, 1, 2, 2**31, 5, 6])
    places = [(int(key), int(position)) for key, position in zip(given.keys, given.positions, strict=True)]
    noise = [[gumbel_rng.exponential(*place, i) for i in range(90)] for place in places]
    assert draw(kernel, given)[0].tolist() == np.argmin(noise, axis=1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filters", "most"),
    [
        ({}, 1.01),
        ({"top_p": 0.95}, 2.2),
        ({"top_k": 50}, 2.2),
        ({"min_p": 0.05}, 2.2),
        ({"top_p": 0.9, "top_k": 50}, 2.2),
    ],
)
def test_a_row_moves_few_bytes_more_than_it_must(kernel, filters, most):
    """A row without filters is read once, one with filters twice; the rest is small. Counted load by load."""
    vocab = 49_152
    moved, again = sampler_triton.moved_bytes(kernel, sampler_triton.like_a_model(vocab), **filters)
    assert 4 * vocab < moved < most * (4 * vocab + 16)
    assert again < 0.2 * 4 * vocab


def test_a_flat_row_with_top_p_is_read_more_often(kernel):
    """Where half of the vocabulary is kept, candidates do not fit in the buffer: the count is not blind to that."""
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 5_000)).astype(np.float32))
    moved, _ = sampler_triton.moved_bytes(kernel, logits, top_p=0.9)
    assert moved > 5 * 4 * 5_000


@pytest.mark.slow
def test_it_compiles_for_gpus_and_no_float64_operation_is_fused():
    """In a process of its own: here the kernel is interpreted. Fused operations would change the units of masses."""
    run = subprocess.run(
        [sys.executable, "-m", "tailrace.lab.benchmarks.engine.compiled"],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    found = json.loads(run.stdout)
    assert {name: part["fused_units"] for name, part in found.items()} == dict.fromkeys(found, 0)
    assert len(found) == 6 and all(part["bytes"] > 10_000 for part in found.values())
    assert all(part["constants"] > 0 for name, part in found.items() if name.startswith("settle"))


def test_float32_alone_would_draw_other_tokens():
    """Why scores are float64: of 3,000 rows of large logits, float32 scores give some another winner."""
    rng = np.random.default_rng(0)
    logits = (20 + 1e-4 * rng.standard_normal((3000, 200))).astype(np.float32)
    log_noise = np.log(rng.exponential(size=logits.shape))
    exact = (logits.astype(np.float64) / 1e-4 - log_noise).argmax(axis=1)
    short = (logits / np.float32(1e-4) - log_noise.astype(np.float32)).argmax(axis=1)
    assert 0 < (exact != short).sum() < 300


def test_float32_masses_would_keep_other_tokens():
    """Why units are float64: of 100 flat rows with top_p, float32 weights and sums end the kept tokens elsewhere."""
    rng = np.random.default_rng(0)
    logits = -np.sort(-rng.standard_normal((100, 20_000)).astype(np.float32), axis=1)
    below = logits - logits[:, :1]
    units = (np.exp(below.astype(np.float64)) * gumbel_rng.MASS_UNITS).astype(np.int64)
    weights = np.exp(below)
    exact = (units.cumsum(axis=1) - units < np.ceil(0.9 * units.sum(axis=1, keepdims=True))).sum(axis=1)
    short = (weights.cumsum(axis=1) - weights < np.float32(0.9) * weights.sum(axis=1, keepdims=True)).sum(axis=1)
    assert (exact != short).sum() > 0
