"""The mask of a row is the support of its draws: the kernel's own filters, tokens that rules forbid left out."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.messages.sampling import MAX_MASK_TOKENS, SamplingParams
from tailrace.deployments.vllm_exact import kept_tokens as masks
from tailrace.deployments.vllm_exact.kept_tokens import kept_tokens
from tailrace.deployments.vllm_exact.kernel_cpu import sample_rows

ROWS, VOCAB = 6, 500


def columns(**changes):
    usual = {"temperature": 0.7, "top_p": 1.0, "top_k": 40, "min_p": 0.0} | changes
    kinds = {"temperature": np.float32, "top_p": np.float32, "top_k": np.int32, "min_p": np.float32}
    return {name: np.full(ROWS, value, kinds[name]) for name, value in usual.items()}


def logits() -> np.ndarray:
    return np.random.default_rng(7).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)


def drawn(rows: np.ndarray, settings, draws: int = 300) -> list[set[int]]:
    """Tokens that draws of each row give."""
    found = [set() for _ in range(ROWS)]
    forced, tolerance = np.full(ROWS, -1, np.int32), np.zeros(ROWS, np.float32)
    for position in range(draws):
        keys, positions = np.arange(ROWS, dtype=np.uint64), np.full(ROWS, position)
        tokens, *_ = sample_rows(rows, keys, positions, **settings, forced=forced, tolerance=tolerance)
        for one, token in zip(found, tokens.tolist(), strict=True):
            one.add(token)
    return found


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.9}])
def test_draws_fall_into_the_mask_and_reach_all_of_it(changes):
    rows, settings = logits(), columns(temperature=1.5, **changes)
    masks = kept_tokens(torch.from_numpy(rows), settings)
    for mask, tokens in zip(masks, drawn(rows, settings), strict=True):
        assert mask == tuple(sorted(mask)) and tokens <= set(mask) and len(mask) <= 40
        assert len(tokens) > len(mask) / 2
    assert changes.get("top_k") is None or "top_p" in changes or {len(mask) for mask in masks} == {5}


def test_renormalising_over_the_mask_gives_the_logprobs_of_the_draw():
    rows, settings = logits(), columns(top_p=0.9)
    forced, tolerance = np.full(ROWS, -1, np.int32), np.zeros(ROWS, np.float32)
    keys, positions = np.arange(ROWS, dtype=np.uint64), np.zeros(ROWS, np.int64)
    tokens, logprobs, *_ = sample_rows(rows, keys, positions, **settings, forced=forced, tolerance=tolerance)
    for row, mask in enumerate(kept_tokens(torch.from_numpy(rows), settings)):
        inside = torch.from_numpy(rows[row] / settings["temperature"][row])[list(mask)].log_softmax(0)
        assert inside[mask.index(tokens[row])].item() == pytest.approx(logprobs[row], abs=1e-5)


def test_ties_at_the_edge_stay_forbidden_tokens_do_not_and_a_greedy_row_keeps_its_draw():
    rows = np.full((ROWS, VOCAB), -np.inf, np.float32)
    rows[:, [3, 4, 9, 11]] = (2.0, 1.0, 1.0, 0.0)
    assert kept_tokens(torch.from_numpy(rows), columns(top_k=2)) == [(3, 4, 9)] * ROWS
    assert kept_tokens(torch.from_numpy(rows), columns()) == [(3, 4, 9, 11)] * ROWS
    assert kept_tokens(torch.from_numpy(rows), columns(temperature=1e-6)) == [(3,)] * ROWS


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 0}])
def test_the_floors_of_both_kernels_keep_the_same_tokens(changes):
    rows, settings = torch.from_numpy(logits()), columns(**changes)
    peaks = rows.argmax(dim=1)
    floors = (of(rows, peaks, settings) for of in (masks._floors_cpu, masks._floors))
    one, other = ((rows >= floor[:, None]) for floor in floors)
    assert torch.equal(one, other)


@pytest.mark.parametrize("settings", [{}, {"top_k": MAX_MASK_TOKENS + 1}, {"top_k": 5, "temperature": 0}])
def test_a_mask_without_a_bound_is_refused(settings):
    with pytest.raises(ValidationError, match="sampling_mask: give a top_k of 1 to 512, and a temperature above 0"):
        SamplingParams(sampling_mask=True, **settings)


def test_a_batch_has_no_masks():
    asked = PromptGroup(prompt_id="p", token_ids=(1, 2), sampling={"sampling_mask": True, "top_k": 5})
    with pytest.raises(ValidationError, match="sampling_mask come in open sessions alone"):
        RolloutBatch(batch_id="b", groups=(asked,))
