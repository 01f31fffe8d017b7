"""Scores the weights of an engine by a chunk of its own, see `deployments.messages.scores`.

Invariant: no other chunk runs meanwhile, and no KV of another chunk is read, so equal weights have equal scores.
Called by `EngineWeights`, on the engine's thread.
"""

import time

import numpy as np

from tailrace.deployments.engine.engine_steps import Steps
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.errors import RequestRefused
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.deployments.messages.scores import BROKEN, SCORED, Score

NAME = "score of the weights"


def score_of(steps: Steps) -> Score:
    """Returns the score of an idle engine's weights: BROKEN if they give no numbers, empty if its context is too
    short.
    """
    chunk = ChunkRequest(
        chunk_id=NAME,
        sample_key=0,
        token_ids=np.array(SCORED, np.int32),
        prompt_tokens=len(SCORED),
        max_tokens=1,
        sampling=SamplingParams(prompt_logprobs=0),
        weights_version=steps.stats().weights_version,
        forced=np.zeros(1, np.int32),
    )
    try:
        steps.add(chunk, time.monotonic())
    except RequestRefused:
        return ()
    while (result := dict(steps.step()).get(NAME)) is None:
        pass
    found = BROKEN if isinstance(result, Exception) else result.prompt_logprobs.logprobs
    return tuple(np.nan_to_num(np.broadcast_to(found, len(SCORED) - 1), nan=BROKEN, neginf=BROKEN).tolist())
