"""How well each length policy predicts which samples have most tokens left: a replay of recorded lengths, no engine.

`after_mates`: some samples of every group have ended, and the others wait without tokens, as after probes. `at_share`:
all samples run in lockstep, one token per turn, until that percentage of the batch's tokens is made. Batches are cut
from the last checkpoint of a trace, and their history from the earlier ones. Figures are means over the batches, once
with that history and once without.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tailrace.app.errors import BadInput
from tailrace.policies.families.lengths import Lengths
from tailrace.policies.families.registry import members
from tailrace.policies.protocol.length_stats import BatchLengths, LengthClasses, batch_lengths
from tailrace.policies.protocol.views import LengthsView

MATES = (0, 1, 4, 8)
SHARES = (25, 50, 75)
CLASS_NAMES = ("short", "medium", "long")


class RecordedGroup(NamedTuple):
    """Lengths in tokens of the batch's samples, and of earlier answers by epoch, newest first."""

    lengths: tuple[int, ...]
    history: tuple[tuple[int, ...], ...]


class Pending(NamedTuple):
    """An unfinished sample: the known lengths of its group, its tokens so far, and its true length."""

    view: LengthsView
    generated: int
    length: int


def read_batches(
    lines: list[dict], count: Callable[[str], int], samples: int, max_tokens: int
) -> list[tuple[RecordedGroup, ...]]:
    """Returns as many batches as a trace holds, each of all prompts with `samples` samples. Lengths are limited as in a
    rollout.

    Raises BadInput if a prompt has fewer samples in its last checkpoint.
    """
    prompts = []
    for line in lines:
        epochs = [[min(max(count(sample["text"]), 1), max_tokens) for sample in e["samples"]] for e in line["epochs"]]
        found = len(epochs[-1]) if epochs else 0
        if found < samples:
            raise BadInput(f"{line['prompt_id']}: {found} samples in its last checkpoint; give --samples that it has")
        prompts.append(epochs[::-1])
    batches = min(len(newest) for newest, *_ in prompts) // samples
    cuts = [slice(number * samples, (number + 1) * samples) for number in range(batches)]
    return [
        tuple(
            RecordedGroup(tuple(newest[cut]), tuple(tuple(epoch[cut]) for epoch in past)) for newest, *past in prompts
        )
        for cut in cuts
    ]


def measure(batches: list[tuple[RecordedGroup, ...]], max_tokens: int) -> dict:
    """Returns by policy and moment the rank correlation of expected and true remaining tokens, and the share of samples
    whose class is predicted right.
    """
    groups = [group for batch in batches for group in batch]
    classes = batch_lengths([(group.history, ()) for group in groups], max_tokens).classes
    lengths = [tokens for group in groups for tokens in group.lengths]
    shares = np.bincount([classes.of(tokens) for tokens in lengths], minlength=3) / len(lengths)
    fresh = [tuple(group._replace(history=()) for group in batch) for batch in batches]
    return {
        "policies": _table(batches, classes, max_tokens),
        "without_history": _table(fresh, classes, max_tokens),
        "batches": len(batches),
        "prompts": len(batches[0]),
        "samples": len(groups[0].lengths),
        "epochs_of_history": max(len(group.history) for group in groups),
        "tokens": sum(lengths),
        "class_shares": {name: round(float(share), 4) for name, share in zip(CLASS_NAMES, shares, strict=True)},
        "class_bounds_tokens": [round(classes.short_tokens), round(classes.medium_tokens)],
        "max_tokens": max_tokens,
    }


def _table(batches: list[tuple[RecordedGroup, ...]], classes: LengthClasses, max_tokens: int) -> dict:
    moments = {
        "after_mates": {str(mates): [_after_mates(b, mates, max_tokens) for b in batches] for mates in MATES},
        "at_share": {str(share): [_in_lockstep(b, share, max_tokens) for b in batches] for share in SHARES},
    }
    guesses = {name: _guess(cls()) for name, cls in members("lengths").items()}
    guesses |= {"always_max": lambda sample: max_tokens, "oracle": lambda sample: sample.length}
    return {
        name: {
            kind: {moment: _score(guess, draws, classes) for moment, draws in named.items()}
            for kind, named in moments.items()
        }
        for name, guess in guesses.items()
    }


def _guess(policy: Lengths) -> Callable[[Pending], int]:
    return lambda sample: policy.expected(sample.view, sample.generated)


def _after_mates(groups: tuple[RecordedGroup, ...], mates: int, max_tokens: int) -> list[Pending]:
    """Returns the unfinished samples once the first `mates` of each group have ended and the others have no tokens."""
    ended = [tuple(sorted(group.lengths[:mates])) for group in groups]
    batch = _batch(groups, ended, max_tokens)
    found = []
    for group, finished in zip(groups, ended, strict=True):
        left = group.lengths[mates:]
        view = LengthsView(finished, (0,) * len(left), group.history, batch, max_tokens)
        found += [Pending(view, 0, length) for length in left]
    return found


def _in_lockstep(groups: tuple[RecordedGroup, ...], share: int, max_tokens: int) -> list[Pending]:
    """Returns the unfinished samples once `share` percent of the batch's tokens are made in lockstep."""
    lengths = np.sort([tokens for group in groups for tokens in group.lengths])
    made = np.array([np.minimum(lengths, turn).sum() for turn in range(lengths[-1] + 1)])
    turn = int(np.searchsorted(made, lengths.sum() * share / 100))
    ended = [tuple(sorted(tokens for tokens in group.lengths if tokens <= turn)) for group in groups]
    batch = _batch(groups, ended, max_tokens)
    found = []
    for group, finished in zip(groups, ended, strict=True):
        left = [tokens for tokens in group.lengths if tokens > turn]
        view = LengthsView(finished, (turn,) * len(left), group.history, batch, max_tokens)
        found += [Pending(view, turn, length) for length in left]
    return found


def _batch(groups: tuple[RecordedGroup, ...], ended: list[tuple[int, ...]], max_tokens: int) -> BatchLengths:
    return batch_lengths([(g.history, finished) for g, finished in zip(groups, ended, strict=True)], max_tokens)


def _score(guess: Callable[[Pending], int], draws: list[list[Pending]], classes: LengthClasses) -> dict:
    """Returns the mean rank correlation, and the share of all samples whose class was predicted right."""
    correlations, hits = [], []
    for draw in draws:
        expected = [guess(sample) for sample in draw]
        left = [tokens - sample.generated for tokens, sample in zip(expected, draw, strict=True)]
        correlations.append(rank_correlation(left, [sample.length - sample.generated for sample in draw]))
        pairs = zip(expected, draw, strict=True)
        hits += [classes.of(tokens) == classes.of(sample.length) for tokens, sample in pairs]
    return {
        "rank_correlation": round(float(np.mean(correlations)), 4),
        "class_accuracy": round(float(np.mean(hits)), 4) if hits else None,  # no sample was left
    }


def rank_correlation(a, b) -> float:
    """Returns Spearman's rank correlation, with ties at their mean rank; 0 if all values of a or of b are equal."""
    if not len(a):
        return 0.0
    ranks = [_ranks(np.asarray(values)) for values in (a, b)]
    one, other = (rank - rank.mean() for rank in ranks)
    scale = np.sqrt((one @ one) * (other @ other))
    return float(one @ other / scale) if scale else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]
