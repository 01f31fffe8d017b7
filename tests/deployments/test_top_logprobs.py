"""The logprobs of the likeliest tokens are those that the kernel reports when it is made to draw them."""

import numpy as np
import pytest
import torch

from tailrace.deployments.vllm_exact.kept_tokens import top_logprobs
from tailrace.deployments.vllm_exact.kernel_cpu import sample_rows

ROWS, VOCAB, COUNT = 6, 500, 40


def columns(**changes):
    usual = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | changes
    kinds = {"temperature": np.float32, "top_p": np.float32, "top_k": np.int32, "min_p": np.float32}
    return {name: np.full(ROWS, value, kinds[name]) for name, value in usual.items()}


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({}, COUNT), ({"temperature": 0.0}, COUNT), ({"top_k": 7}, 7), ({"top_p": 0.5}, None), ({"min_p": 0.2}, None)],
)
def test_they_are_those_of_draws(changes, kept):
    logits = np.random.default_rng(5).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    settings = columns(**changes)
    found = top_logprobs(torch.from_numpy(logits), COUNT, settings)
    for place in range(COUNT):
        tokens = np.array([row[place][0] for row in found], np.int32)
        assert (tokens == np.argsort(-logits, axis=1, kind="stable")[:, place]).all()
        keys, positions = np.zeros(ROWS, np.uint64), np.zeros(ROWS, np.int64)
        _, logprobs, _, _ = sample_rows(
            logits, keys, positions, **settings, forced=tokens, tolerance=np.zeros(ROWS, np.float32)
        )
        ours = np.array([row[place][1] for row in found])
        assert kept is None or np.isfinite(ours).all() == (place < kept)
        np.testing.assert_allclose(ours[np.isfinite(ours)], logprobs[np.isfinite(ours)], atol=1e-4)
    masses = [sum(np.exp(value) for _, value in row) for row in found]
    assert max(masses) < 1 + 1e-5
    if "top_p" in changes or "min_p" in changes:
        assert all(1 <= np.isfinite([value for _, value in row]).sum() < COUNT for row in found)
        np.testing.assert_allclose(masses, 1.0, atol=1e-5)
