"""What an engine does before its first chunk, so that nobody's chunk is the one that waits for it.

Small chunks have kernels compiled (10 s once per machine) and tell how fast prompts are computed; an engine that drafts
also verifies wrong drafts of several lengths, so that its drafting policy knows from the start what a step costs.
Called by the stepper, once; about a second.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from deployments.messages import ChunkRequest, SamplingParams

CONTEXT_TOKENS = (8, 192)
"""A small step, and one that tells how fast prompts are computed."""

VERIFIED = ((1, 0), (1, 1), (1, 3), (1, 7), (1, 15), (4, 3), (4, 7), (4, 15))
"""Chunks, and draft tokens of each: steps of 1 to 64 tokens. What costs more is learned at work."""

STEPS = 4
ANSWER, WRONG = 1, 2
"""Tokens that a rehearsed chunk is made to emit, and of its drafts: never the same."""


def warm_up(stepper, vocabulary: int) -> None:
    """Compile, and measure prompts. `stepper`: an idle Stepper."""
    for tokens in CONTEXT_TOKENS:
        context = np.arange(tokens, dtype=np.int32) % vocabulary
        stepper.add(_chunk("warm-up", context, 2, stepper.weights_version, None), time.monotonic())
        _run(stepper, lambda: None)


def rehearse(stepper, max_running: int, draft_tokens: int) -> None:
    """Verify wrong drafts; the stepper files what each step took."""
    forced, context = np.full(STEPS + 1, ANSWER, np.int32), np.full(CONTEXT_TOKENS[0], WRONG, np.int32)
    for chunks, drafts in VERIFIED:
        for number in range(min(chunks, max_running)):
            chunk = _chunk(f"rehearsal-{number}", context, STEPS + 1, stepper.weights_version, forced)
            stepper.add(chunk, time.monotonic())
        _run(stepper, partial(stepper.draft_for_all, [WRONG] * min(drafts, draft_tokens)))


def _run(stepper, between: Callable[[], None]) -> None:
    while stepper.busy:
        stepper.step()
        between()


def _chunk(name: str, context: np.ndarray, max_tokens: int, version: int, forced: np.ndarray | None) -> ChunkRequest:
    return ChunkRequest(name, 0, context, len(context), max_tokens, SamplingParams(), version, forced=forced)
