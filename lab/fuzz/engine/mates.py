"""Healthy requests whose tokens alone are known: odd requests beside them must not change one."""

import numpy as np

from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, sample_key
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.lab.fuzz.engine.entry import plan

WORDS = np.array([504, 2365, 355, 260, 4052, 314, 253, 1568, 282, 260, 1004, 28], np.int32)
MATE_TOKENS = 20
SAMPLINGS = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.0),
    SamplingParams(bad_words=(",",), min_tokens=5, repetition_penalty=1.1),
)
MATES = len(SAMPLINGS)

LOGPROB_NOISE = 1e-4
"""Maximum distance of two logprobs: those of the demo model moved by up to 2.2e-5 between batch shapes; see
EngineConfig."""


def mate(number: int, key: int, group_id: str | None) -> ChunkRequest:
    """Returns a healthy chunk. `key`: decides its prompt and its noise. `group_id`: group of its drafts, or None for no
    drafts."""
    prompt = np.tile(np.roll(WORDS, key), 2)
    return ChunkRequest(
        chunk_id=f"mate-{number}",
        sample_key=sample_key(key, 0, "mates", number),
        token_ids=prompt,
        prompt_tokens=len(prompt),
        max_tokens=MATE_TOKENS,
        sampling=SAMPLINGS[number],
        weights_version=0,
        draft=None if group_id is None else plan(group_id, number),
    )


def difference(expected: ChunkResult, got: ChunkResult | Exception) -> str | None:
    """Returns in one line how a mate's answer differs from its answer alone, or None."""
    if isinstance(got, Exception):
        return f"it got {type(got).__name__}: {got}"
    if got.token_ids.tolist() != expected.token_ids.tolist():
        return f"tokens {got.token_ids.tolist()}, alone {expected.token_ids.tolist()}"
    if got.end is not expected.end:
        return f"its end is {got.end}, alone {expected.end}"
    noise = logprob_noise(expected, got)
    return f"logprobs differ by {noise}" if not noise <= LOGPROB_NOISE else None


def logprob_noise(expected: ChunkResult, got: ChunkResult) -> float:
    """Returns the largest distance of two logprobs of one position."""
    pairs = ((expected.logprobs, got.logprobs), (expected.raw_logprobs, got.raw_logprobs))
    return max(float(np.abs(one - other).max(initial=0.0)) for one, other in pairs)
