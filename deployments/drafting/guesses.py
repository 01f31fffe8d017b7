"""Pieces of drafts: a proposal cut short, appended to what is known, or compared with what came.

Called by `Drafts`; plain functions of arrays.
"""

import numpy as np

from tailrace.deployments.draft_index.proposal import Proposal
from tailrace.deployments.messages.context import Source

CERTAIN = 0.999
"""That a token which a copy of the sample has made comes here too: copies share their noise; floating point remains."""

NOTHING = Proposal(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8), 0)


def behind(known: np.ndarray, guess: Proposal) -> Proposal:
    """A proposal for what follows known tokens, with them before it."""
    count = len(known)
    return Proposal(
        tokens=np.concatenate([known, guess.tokens]),
        right=np.concatenate([np.full(count, CERTAIN, np.float32), guess.right]),
        sources=np.concatenate([np.full(count, Source.OWN, np.uint8), guess.sources]),
        match_tokens=count + guess.match_tokens,
    )


def cut(proposal: Proposal, tokens: int) -> Proposal:
    """Its first this many tokens."""
    return proposal._replace(
        tokens=proposal.tokens[:tokens], right=proposal.right[:tokens], sources=proposal.sources[:tokens]
    )


def agreed(draft: list[int], tokens: list[int]) -> int:
    """How many tokens of a draft are those that came. Behind a stop token vLLM cuts the rest, the bonus token too."""
    for place, (guess, token) in enumerate(zip(draft, tokens, strict=False)):
        if guess != token:
            return place
    return min(len(draft), len(tokens))
