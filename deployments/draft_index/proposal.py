"""The draft type of group indexes and drafters, and its operations. Separate from both, because it imports neither."""

from typing import NamedTuple

import numpy as np

from tailrace.deployments.messages.context import Source

CERTAIN = 0.999
"""Probability that the sample emits a token of its copy: copies share their noise, but floating point may differ."""


class Proposal(NamedTuple):
    """Draft tokens of one path: tokens i32[n], right f32[n] (P(token j is right | those before are)), sources u8[n].

    `sources`: values of messages.context.Source. `match_tokens`: context tokens that the longest matching place shares.
    """

    tokens: np.ndarray
    right: np.ndarray
    sources: np.ndarray
    match_tokens: int

    def first(self, count: int) -> "Proposal":
        """Returns the first `count` tokens."""
        return self._replace(tokens=self.tokens[:count], right=self.right[:count], sources=self.sources[:count])

    def after(self, known: np.ndarray) -> "Proposal":
        """Returns the proposal with the tokens `known`, i32[k], of the sample's own copy before it."""
        count = len(known)
        return Proposal(
            tokens=np.concatenate([known, self.tokens]),
            right=np.concatenate([np.full(count, CERTAIN, np.float32), self.right]),
            sources=np.concatenate([np.full(count, Source.OWN, np.uint8), self.sources]),
            match_tokens=count + self.match_tokens,
        )

    @property
    def expected(self) -> float:
        """Returns the expected number of right tokens."""
        return float(np.cumprod(self.right).sum())

    def joined(self, other: "Proposal") -> "Proposal":
        """Returns the path of maximum expected tokens through the tree of both proposals.

        A token that both propose has the greater of its two probabilities. After the last such token the better end
        follows.
        """
        both = accepted_tokens(self.tokens.tolist(), other.tokens.tolist())
        right = np.maximum(self.right[:both], other.right[:both])
        ends = [each._replace(tokens=each.tokens[both:], right=each.right[both:]) for each in (self, other)]
        best, end = (self, ends[0]) if ends[0].expected >= ends[1].expected else (other, ends[1])
        return Proposal(
            tokens=best.tokens,
            right=np.concatenate([right, end.right]),
            sources=np.concatenate([self.sources[:both], best.sources[both:]]),
            match_tokens=max(self.match_tokens, other.match_tokens),
        )


NOTHING = Proposal(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8), 0)


def accepted_tokens(draft: list[int], tokens: list[int]) -> int:
    """Returns the number of correct draft tokens. After a stop token vLLM cuts all tokens, the bonus token too."""
    for place, (guess, token) in enumerate(zip(draft, tokens, strict=False)):
        if guess != token:
            return place
    return min(len(draft), len(tokens))
