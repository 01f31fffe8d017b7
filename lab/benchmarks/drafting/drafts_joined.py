"""A draft model's guesses and the index's proposals in one tree: `joined` of `bench drafts`.

The draft model is artificial. It guesses WINDOW tokens per step. The share of its right tokens is known, but not which
ones are right, as an engine knows the acceptance of a drafter. Like a real draft model it is more often right for easy
tokens. A token is easy if it follows the same token in the prompt or in a mate. Easy tokens are right four times as
often as others.
"""

from collections.abc import Callable

import numpy as np

from tailrace.deployments.draft_index.proposal import NOTHING, Proposal
from tailrace.deployments.draft_index.scorer import CandidateScorer
from tailrace.deployments.messages.context import Source
from tailrace.lab.benchmarks.drafting.drafts import DRAFT_TOKENS, MOST_MATES, RecordedRollouts, Setting, agreed, indexes
from tailrace.lab.benchmarks.drafting.drafts_refused import pairs_of

WINDOW = 4
CHANCES = (0.3, 0.5, 0.7)
"""Shares of a target's tokens that the draft model guesses right."""

EASIER = 4.0
WAYS: dict[str, Callable[[Proposal, Proposal], Proposal]] = {
    "model": lambda model, index: model,
    "model_first": lambda model, index: model if len(model.tokens) else index,
    "joined": lambda model, index: model.joined(index).first(DRAFT_TOKENS),
}
"""Functions of guess and proposal that return the draft to verify. `model_first`: the guess if there is one, else the
proposal.
"""


def measure(
    rollouts: list[RecordedRollouts], setting: Setting, new: Callable[[], CandidateScorer] = CandidateScorer
) -> dict:
    """Returns tokens per step by the draft model's chance, then by way."""
    return {
        f"{chance}": {name: round(_replay(rollouts, setting, new(), chance, way), 3) for name, way in WAYS.items()}
        for chance in CHANCES
    }


def _replay(rollouts: list[RecordedRollouts], setting: Setting, evidence: CandidateScorer, chance: float, way) -> float:
    tokens = steps = 0
    for number, (index, prompt, target) in enumerate(indexes(rollouts, setting, evidence)):
        right, at = _right(prompt, setting, target, chance, np.random.default_rng(number)), 0
        truth = target.tolist()
        while at < len(truth):
            paths = index.propose(MOST_MATES, DRAFT_TOKENS)
            draft = way(_guess(target, right, at, chance), paths[0] if paths else NOTHING)
            emitted = min(agreed(draft.tokens.tolist(), truth, at) + 1, len(truth) - at)
            index.extend(MOST_MATES, at, target[at : at + emitted])
            tokens, steps, at = tokens + emitted, steps + 1, at + emitted
    return tokens / max(1, steps)


def _right(prompt: RecordedRollouts, setting: Setting, target: np.ndarray, chance: float, rng) -> np.ndarray:
    """Returns bool[n]: whether the draft model guesses each token of the target right, the same for all of WAYS."""
    known = {pair for text in (prompt.prompt, *prompt.mates[: setting.mates]) for pair in pairs_of(text)}
    easy = np.array([pair in known for pair in pairs_of([int(prompt.prompt[-1]), *target.tolist()])])
    weights = np.where(easy, EASIER, 1.0)
    return rng.random(len(target)) < np.minimum(0.98, chance * weights / weights.mean())


def _guess(target: np.ndarray, right: np.ndarray, at: int, chance: float) -> Proposal:
    """Returns the guess after `at` tokens of the target; a wrong token is the right one plus 1."""
    tokens = np.where(right, target, target + 1)[at : at + WINDOW].astype(np.int32)
    size = len(tokens)
    return Proposal(tokens, np.full(size, chance, np.float32), np.full(size, Source.MODEL, np.uint8), 0)
