"""What an engine does before its first chunk, so that nobody's chunk is the one that waits for it.

Small chunks have kernels compiled (10 s once per machine) and tell how fast prompts are computed; an engine that drafts
also verifies wrong drafts of several lengths, so that its drafting policy knows from the start what a step costs.
Called by the stepper, once; about a second.
"""

import time

import numpy as np

from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.rollout import SamplingParams

CONTEXT_TOKENS = (8, 192)
"""A small step, and one that tells how fast prompts are computed."""

VERIFIED = ((1, 0), (1, 1), (1, 3), (1, 7), (1, 15), (4, 3), (4, 7), (4, 15))
"""Chunks, and draft tokens of each: steps of 1 to 64 tokens. What costs more is learned at work."""

STEPS = 4
ANSWER, WRONG = 1, 2
"""Tokens that a rehearsed chunk is made to emit, and of its drafts: never the same."""


def warm_up(stepper) -> None:
    """Compile, and measure prompts. `stepper`: an idle Stepper."""
    for tokens in CONTEXT_TOKENS:
        stepper.add(chunk_of("warm-up", tokens, 2, stepper.weights_version), time.monotonic())
        while stepper.busy:
            stepper.step()


def rehearse(stepper, max_running: int, draft_tokens: int) -> None:
    """Verify wrong drafts; the stepper files what each step took."""
    for chunks, drafts in VERIFIED:
        for number in range(min(chunks, max_running)):
            chunk = chunk_of(f"rehearsal-{number}", CONTEXT_TOKENS[0], STEPS + 1, stepper.weights_version)
            stepper.add(chunk, time.monotonic())
        while stepper.busy:
            stepper.step()
            stepper.draft_for_all([WRONG] * min(drafts, draft_tokens))


def chunk_of(name: str, context_tokens: int, max_tokens: int, version: int = 0, first_token: int = 0) -> ChunkRequest:
    """A chunk that answers ANSWER to a context of `first_token` and others, and does not end before `max_tokens`."""
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
