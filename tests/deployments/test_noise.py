"""The noise: SplitMix64 as published, the same integers in Python, numba and torch, numbers inside (0, 1)."""

import numpy as np
import pytest
import torch
import torch_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from tailrace.deployments.vllm_exact import gumbel_rng, kernel_cpu

KEYS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31)


def test_the_stream_is_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [gumbel_rng.output(1234567, i) for i in range(4)] == published


@settings(max_examples=50, deadline=None)
@given(KEYS, POSITIONS)
def test_three_implementations_make_the_same_integers(key, position):
    vocab = 40
    reference = [gumbel_rng.output(gumbel_rng.row_key(key, position), i) for i in range(vocab)]
    keys = torch.from_numpy(np.array([key], np.uint64).view(np.int64))
    in_torch = torch_kernel.hashes(keys, torch.tensor([position]), vocab)[0].numpy().view(np.uint64)
    in_numba = [kernel_cpu.hashed(np.uint64(key), position, i) for i in range(vocab)]
    assert in_torch.tolist() == reference
    assert in_numba == reference


@pytest.mark.parametrize("hashed", [0, 1, 2**12, 2**63, 2**64 - 1])
def test_uniforms_lie_strictly_inside_the_unit_interval(hashed):
    u = gumbel_rng.uniform(hashed)
    assert 0.0 < u < 1.0
    assert u == ((hashed >> 12) * 2 + 1) / 2**53  # exact: nothing was rounded


def test_neighbouring_positions_keys_and_tokens_look_independent():
    count = 4000
    along = {
        "tokens": [gumbel_rng.exponential(7, 3, i) for i in range(count)],
        "positions": [gumbel_rng.exponential(7, t, 3) for t in range(count)],
        "keys": [gumbel_rng.exponential(k, 7, 3) for k in range(count)],
    }
    for name, values in along.items():
        assert kstest(values, "expon").pvalue > 1e-3, name
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06, name
    assert abs(np.corrcoef(along["tokens"], along["positions"])[0, 1]) < 0.06
