"""How often the drafts of each method are right, sample by sample: a replay of recorded rollouts, without an engine.

The rates are the profile in a ladder's rung. A sample's rate is the chance per draft token that would give the sample's
tokens per verification with 8 draft tokens. Steps in which the method proposed fewer tokens count too, so that rates of
different methods can be compared. Called by `tailrace bench ladder --trace`.
"""

from collections.abc import Callable

import numpy as np

from tailrace.deployments.draft_index.scorer import CandidateScorer
from tailrace.lab.benchmarks.drafting.drafts import DRAFT_TOKENS, RecordedRollouts, Setting, replay
from tailrace.lab.simulator.acceptance import chance_for

SETTINGS = {"group": Setting(mates=7), "history": Setting(history=16)}


def profiles(
    rollouts: list[RecordedRollouts], look_up: Callable[[np.ndarray, int], np.ndarray], say: Callable[[str], None]
) -> dict[str, tuple[float, ...]]:
    """Returns the rates of all targets, by method; without `history` if the trace has one checkpoint.

    `look_up`: takes tokens and a maximum number, returns the n-gram drafts after the tokens.
    """
    settings = {name: setting for name, setting in SETTINGS.items() if not setting.history or rollouts[0].history}
    found = {name: _of_index(rollouts, setting) for name, setting in settings.items()}
    found["ngram"] = tuple(_of_ngrams(one.prompt, target, look_up) for one in rollouts for target in one.targets)
    for name, rates in found.items():
        say(f"{name}: {np.mean(rates):.2f} of {len(rates)} samples' drafts are right")
    return found


def rate(tokens: int, verifications: int) -> float:
    """Returns the chance per draft token by these counts: 0 if no draft was right, 1 if all were."""
    mean = tokens / max(1, verifications)
    if mean <= 1:
        return 0.0
    return 1.0 if mean >= 1 + DRAFT_TOKENS else chance_for(mean, DRAFT_TOKENS)


def _of_index(rollouts: list[RecordedRollouts], setting: Setting) -> tuple[float, ...]:
    evidence, rates = CandidateScorer(), []
    for one in rollouts:
        for target in one.targets:
            tally = replay([one._replace(targets=[target])], setting, evidence)
            rates.append(rate(tally.tokens, tally.steps))
    return tuple(rates)


def _of_ngrams(prompt: np.ndarray, target: np.ndarray, look_up: Callable[[np.ndarray, int], np.ndarray]) -> float:
    whole, at, steps = np.concatenate([prompt, target]), len(prompt), 0
    while at < len(whole):
        draft = look_up(whole[:at], DRAFT_TOKENS)
        truth = whole[at : at + len(draft)]
        wrong = np.flatnonzero(draft[: len(truth)] != truth)
        at += 1 + (int(wrong[0]) if len(wrong) else len(truth))
        steps += 1
    return rate(len(target), steps)
