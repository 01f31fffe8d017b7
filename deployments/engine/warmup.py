"""Warm-up of an engine before its first chunk, so that no chunk waits for it.

Small chunks compile the kernels (10 s once per machine) and measure the speed of prompts.
An engine that drafts also verifies wrong drafts of several lengths.
Its drafting policy therefore knows the cost of a step from the start.
The engine then scores its weights. Called by the stepper, once; takes about a second.
"""

import time

import numpy as np

from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.rollout import SamplingParams

CONTEXT_TOKENS = (8, 192)
"""Context lengths: a small step, and one that measures the speed of prompts; shorter where the model takes no more."""

VERIFIED = ((1, 0), (1, 1), (1, 3), (1, 7), (1, 15), (4, 3), (4, 7), (4, 15))
"""Numbers of chunks, and draft tokens of each: steps of 1 to 64 tokens. Costs of larger steps are learned from real
chunks.
"""

STEPS = 4
ANSWER, WRONG = 1, 2
"""The forced token of a rehearsed chunk, and the token of its drafts, which always differs."""


def warm_up(stepper, max_running: int, draft_tokens: int) -> None:
    """Compiles the kernels and measures prompts, and drafts of up to `draft_tokens`. `stepper`: an idle Stepper."""
    for tokens in CONTEXT_TOKENS:
        stats = stepper.stats()
        fitting = min(tokens, stats.max_model_len - 2)
        stepper.add(chunk_of("warm-up", fitting, 2, stats.weights_version), time.monotonic())
        while stepper.busy:
            stepper.step()
    if draft_tokens:
        rehearse(stepper, max_running, draft_tokens)
    stepper.weights.score(stepper)


def rehearse(stepper, max_running: int, draft_tokens: int) -> None:
    """Verifies wrong drafts; the stepper records the time of each step."""
    for chunks, drafts in VERIFIED:
        for number in range(min(chunks, max_running)):
            chunk = chunk_of(f"rehearsal-{number}", CONTEXT_TOKENS[0], STEPS + 1, stepper.stats().weights_version)
            stepper.add(chunk, time.monotonic())
        while stepper.busy:
            stepper.step()
            stepper.draft_for_all([WRONG] * min(drafts, draft_tokens))


def chunk_of(name: str, context_tokens: int, max_tokens: int, version: int = 0, first_token: int = 0) -> ChunkRequest:
    """Returns a chunk that answers ANSWER to a context that begins with `first_token`; it ends at `max_tokens`."""
    context = np.full(context_tokens, WRONG, np.int32)
    context[0] = first_token
    forced = np.full(max_tokens, ANSWER, np.int32)
    return ChunkRequest(
        chunk_id=name,
        sample_key=0,
        token_ids=context,
        prompt_tokens=len(context),
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        weights_version=version,
        forced=forced,
    )
