"""One sample that a draft model drafts for: its confirmed tokens, its window and its request in vLLM.

Plain data for `Sessions`, on the drafter's thread.
"""

import time

from tailrace.deployments.drafter.window import Window
from tailrace.deployments.drafter.wire import Open
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.policies.protocol.actions import DraftMode


class Session:
    """One sample that is drafted for."""

    __slots__ = (
        "accepted", "at", "chunk", "coupled", "fits", "fresh", "late", "name", "request", "terms", "tested", "tokens",
        "told", "used_s", "window",
    )  # fmt: skip

    def __init__(self, wish: Open, max_model_len: int):
        self.terms = wish[:8]
        sampling = SamplingParams(
            temperature=wish.temperature, top_p=wish.top_p, top_k=wish.top_k, min_p=wish.min_p,
            stop_token_ids=tuple(wish.stop_token_ids),
        )  # fmt: skip
        self.chunk = ChunkRequest(
            chunk_id=wish.name,
            sample_key=wish.key,
            token_ids=wish.tokens,
            prompt_tokens=wish.prompt_tokens,
            max_tokens=1,
            sampling=sampling,
            weights_version=0,
        )
        self.tokens: list[int] = wish.tokens.tolist()  # confirmed ones
        self.window = Window(len(self.tokens), min(wish.end, max_model_len), DraftMode(wish.window, wish.coupled))
        self.coupled = wish.coupled
        self.request, self.name = None, ""  # vLLM's scheduler-side Request, and the name of its outputs
        self.at = 0  # position of the request's next token; behind `window.reached` once the verifier has overtaken it
        self.fits = True  # into the KV cache, beside those that were opened before
        self.fresh = False  # has something to tell
        self.told = -1  # tokens that were confirmed when the last guess was told; -1: none was, yet
        self.late = False  # its verifier has gone on without a guess, so it waits for none
        self.tested = self.accepted = 0  # drafts whose turn has come, and those that were right
        self.used_s = time.monotonic()

    @property
    def computing(self) -> bool:
        """Whether its request has made no token yet."""
        return self.request is not None and not self.request.num_output_tokens

    def extends_to(self, wish: Open) -> bool:
        """Whether this very sample is asked for, with these tokens and perhaps more."""
        return self.terms == wish[:8] and wish.tokens[: len(self.tokens)].tolist() == self.tokens
