"""One opened sample of a draft model: its confirmed tokens, its window and its request in vLLM.

Plain data for `Sessions`, on the drafter's thread.
"""

import time

from tailrace.deployments.drafter.window import Window
from tailrace.deployments.drafter.wire import Open
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.policies.protocol.actions import DraftMode


class Session:
    """State of one opened sample."""

    __slots__ = (
        "accepted", "at", "chunk", "coupled", "fits", "fresh", "late", "name", "request", "sent", "terms", "tested",
        "tokens", "used_s", "window",
    )  # fmt: skip

    def __init__(self, wish: Open, max_model_len: int):
        self.terms = wish.terms
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
        self.at = 0  # position of the request's next token; below `window.reached` once overtaken
        self.fits = True  # True if it fits into the KV cache, after earlier samples
        self.fresh = False  # has an unsent guess
        self.sent = -1  # confirmed tokens at the last guess sent; -1 before the first
        self.late = False  # its verifier continued without a guess, so it is not waiting
        self.tested = self.accepted = 0  # tested draft tokens, and the right ones
        self.used_s = time.monotonic()

    @property
    def computing(self) -> bool:
        """True if its request has no output token yet."""
        return self.request is not None and not self.request.num_output_tokens

    def extends_to(self, wish: Open) -> bool:
        """Returns whether `wish` is for this same sample, with these tokens and perhaps more."""
        return self.terms == wish.terms and wish.tokens[: len(self.tokens)].tolist() == self.tokens
