"""The tokens of replayed samples: each is given, and the samplers draw none for it. Called by the samplers."""

import numpy as np

DRAWN = -1
"""Stands for a token that is drawn."""


def forced_token(args: dict, position: int) -> int:
    """Returns the token of a replayed sample at `position`: the next one of its list, then end of sequence.

    DRAWN inside its prompt: vLLM drafts after each piece of a long prompt, too.
    """
    place = position - args["prompt_tokens"]
    if place < 0:
        return DRAWN
    return args["forced"][place] if place < len(args["forced"]) else args["eos"]


def forced_tokens(replays: dict[int, dict], owner: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns i32[m]: the token of each row in the answer of a replay, else -1. `replays`: arguments by batch index."""
    forced = np.full(len(owner), DRAWN, np.int32)
    for row in np.flatnonzero(np.isin(owner, list(replays))).tolist():
        forced[row] = forced_token(replays[owner[row]], int(positions[row]))
    return forced
