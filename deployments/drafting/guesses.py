"""Operations on drafts: cut a proposal, append it to known tokens, compare it with the emitted tokens.

Called by `EngineDrafts`; plain functions of arrays.
"""

import numpy as np

from tailrace.deployments.draft_index.proposal import Proposal
from tailrace.deployments.messages.context import Source

CERTAIN = 0.999
"""Probability that the sample emits a token of its copy: copies share their noise, but floating point may differ."""

NOTHING = Proposal(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8), 0)


def behind(known: np.ndarray, guess: Proposal) -> Proposal:
    """Returns a proposal with known tokens placed before the guess that follows them."""
    count = len(known)
    return Proposal(
        tokens=np.concatenate([known, guess.tokens]),
        right=np.concatenate([np.full(count, CERTAIN, np.float32), guess.right]),
        sources=np.concatenate([np.full(count, Source.OWN, np.uint8), guess.sources]),
        match_tokens=count + guess.match_tokens,
    )


def cut(proposal: Proposal, tokens: int) -> Proposal:
    """Returns a proposal's first `tokens` tokens."""
    return proposal._replace(
        tokens=proposal.tokens[:tokens], right=proposal.right[:tokens], sources=proposal.sources[:tokens]
    )


def agreed(draft: list[int], tokens: list[int]) -> int:
    """Returns the number of correct draft tokens. After a stop token vLLM cuts all tokens, the bonus token too."""
    for place, (guess, token) in enumerate(zip(draft, tokens, strict=False)):
        if guess != token:
            return place
    return min(len(draft), len(tokens))
