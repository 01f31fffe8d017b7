"""What a replica says of its own speed: decode steps with the drafts they carry, prompts and pulls by the token."""

import pytest

from tailrace.policies.models.speed_estimator import SpeedEstimator

BASE_S, CHUNK_S, TOKEN_S = 0.06, 0.004, 0.003


def speeds() -> SpeedEstimator:
    measured = SpeedEstimator()
    measured.pull(1000, 0.02)
    measured.pull(2000, 0.03)
    return measured


def run(measured: SpeedEstimator, steps: int, drafts: int, prompt_each: int = 16) -> None:
    """Decode steps of 1 to 8 chunks with so many draft tokens each; each `prompt_each`-th computes a prompt instead."""
    for step in range(steps):
        chunks, decodes = 1 + step % 8, step % prompt_each > 0
        tokens = chunks + (drafts * chunks if decodes else 200)
        took_s = BASE_S + CHUNK_S * chunks + TOKEN_S * (tokens - chunks)
        measured.step(chunks, tokens, took_s, decodes)


@pytest.mark.parametrize("drafts", [0, 3, 16])
def test_a_decode_step_is_told_with_the_drafts_that_chunks_have_verified(drafts):
    measured = speeds()
    run(measured, 800, drafts)
    report = measured.report()
    for chunks in (1, 4, 8):
        told = report["step_base_s"] + report["step_per_chunk_s"] * chunks
        assert told == pytest.approx(BASE_S + (CHUNK_S + drafts * TOKEN_S) * chunks, rel=0.02)
    assert report["prefill_tokens_s"] == pytest.approx(1 / TOKEN_S, rel=0.02)


def test_it_follows_drafts_that_get_longer():
    measured = speeds()
    run(measured, 800, 2)
    before = measured.report()["step_per_chunk_s"]
    run(measured, 800, 12)
    assert before < measured.report()["step_per_chunk_s"] == pytest.approx(CHUNK_S + 12 * TOKEN_S, rel=0.1)


def test_a_prompt_is_no_draft():
    measured = speeds()
    run(measured, 400, 0, prompt_each=2)
    assert measured.report()["step_per_chunk_s"] == pytest.approx(CHUNK_S, rel=0.05)


def test_nothing_is_told_before_a_pull_was_seen():
    measured = SpeedEstimator()
    run(measured, 10, 0)
    assert measured.report() is None
