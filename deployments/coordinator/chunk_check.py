"""A check of an engine's answer: whether it can belong to the chunk that was started. Called by `ChunkRunner`."""

import numpy as np

from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.policies.protocol.actions import StartChunk


def check_result(start: StartChunk, result: ChunkResult, prompt_tokens: int) -> None:
    """Raises ValueError, one line, if a result cannot belong to the chunk: its tokens must not reach a sample."""
    tokens, problem = result.token_ids, None
    if result.chunk_id != start.chunk_id:
        problem = f"it is of {result.chunk_id}"
    elif result.weights_version != start.weights_version:
        problem = f"weights {result.weights_version} made it, not {start.weights_version}"
    elif len(tokens) > start.max_tokens:
        problem = f"{len(tokens)} tokens, asked for at most {start.max_tokens}"
    elif not len(tokens) == len(result.logprobs) == len(result.raw_logprobs):
        problem = f"{len(tokens)} tokens, {len(result.logprobs)} and {len(result.raw_logprobs)} logprobs"
    elif len(tokens) and tokens.min() < 0:
        problem = f"token {tokens.min()}"
    elif result.top_logprobs and len(result.top_logprobs) != len(tokens):
        problem = f"{len(tokens)} tokens, {len(result.top_logprobs)} top_logprobs"
    elif result.sampling_mask and len(result.sampling_mask) != len(tokens):
        problem = f"{len(tokens)} tokens, {len(result.sampling_mask)} sampling masks"
    elif result.prompt_logprobs is not None and len(result.prompt_logprobs.logprobs) != prompt_tokens - 1:
        problem = f"{len(result.prompt_logprobs.logprobs)} logprobs of a prompt of {prompt_tokens} tokens"
    elif any(np.isnan(some).any() for some in (result.logprobs, result.raw_logprobs)):
        problem = "a logprob is not a number: the sampling parameters allow no token, or the model's weights are broken"
    if problem is not None:
        raise ValueError(f"chunk {start.chunk_id}: the answer of {start.replica_id} is refused: {problem}")
