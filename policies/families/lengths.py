"""Length policies: the expected length of an answer, by its group, its prompt's history and the batch.

Contract: `expected` is a pure function, within generated + 1 to max_tokens. `reads_all` says whether it reads `running`
and `batch` of its view; if not, the core leaves them empty. Called by `LengthTracker` when a sample is queued or one of
its mates finishes; orderings and drafting use the result.
"""

from itertools import chain
from math import ceil, erfc, exp, log, pi, sqrt
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.models.length_belief import LengthLaw, Remainders, remainders
from tailrace.policies.protocol.length_stats import LONG
from tailrace.policies.protocol.views import BeliefView, LengthsView

HUBER = 1.345
"""Number of standard deviations at which evidence is clipped (Huber's): one runaway answer must not decide for its
prompt.
"""


@runtime_checkable
class Lengths(Protocol):
    """The interface of a lengths policy, built in or the user's own."""

    reads_all: bool

    def expected(self, group: LengthsView, generated: int) -> int:
        """Returns the expected tokens of the whole answer of a sample that has `generated` and continues."""


class MaxFinished(BaseModel):
    """Seer 4.3: as long as the longest finished mate; max_tokens while none has finished."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["max_finished"] = "max_finished"
    reads_all: ClassVar[bool] = False

    def expected(self, group: LengthsView, generated: int) -> int:
        longest = group.finished[-1] if group.finished else group.max_tokens
        return longest if longest > generated else generated + 1


class HistoryQuantile(BaseModel):
    """A quantile of the prompt's earlier answers that got as far; without history, of its finished mates'.

    RhymeRL 6 ranks prompts by the median of their last epoch. An answer longer than all of them counts as max_tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["history_quantile"] = "history_quantile"
    file_keys: ClassVar[tuple[str, ...]] = ()
    reads_all: ClassVar[bool] = False
    quantile: float = Field(0.5, ge=0.0, le=1.0, description="which one: 0.5 is the median")
    epochs: int = Field(1, ge=1, description="newest epochs that count")

    def expected(self, group: LengthsView, generated: int) -> int:
        past = [*chain(*group.history[: self.epochs])] or group.finished
        longer = sorted(tokens for tokens in past if tokens > generated)
        return _within(
            group, generated, longer[ceil(self.quantile * (len(longer) - 1))] if longer else group.max_tokens
        )


class LengthClassEstimate(BaseModel):
    """DAS 4.2: the typical length of its class, short, medium or long, which rises as the answer grows."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["length_class"] = "length_class"
    reads_all: ClassVar[bool] = True

    def expected(self, group: LengthsView, generated: int) -> int:
        return _within(group, generated, group.batch.classes.typical_tokens[length_class(group, generated)])


class Shrunk(BaseModel):
    """The mean remainder of an answer that got this far, by a log-normal law shrunk between prompt and batch.

    Log lengths of a prompt scatter about its own mean, and these about the batch's; the share of the spread between
    prompts is estimated as the step continues. A prompt's mean is the posterior one given its history, its
    finished mates, and its running ones as right-censored answers (by EM).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["shrunk"] = "shrunk"
    file_keys: ClassVar[tuple[str, ...]] = ()
    reads_all: ClassVar[bool] = True
    history_weight: float = Field(
        0.7,
        ge=0.0,
        le=1.0,
        description="weight of an answer of the last epoch against a current one; older ones weigh less",
    )

    def expected(self, group: LengthsView, generated: int) -> int:
        batch = group.batch
        if not batch.answers:
            return _within(group, generated, group.max_tokens)
        spread = batch.spread_log * sqrt(1 - batch.between_share)
        prior = (1 - batch.between_share) / batch.between_share  # answers that the batch's mean is worth
        low, high = (batch.mean_log + sign * HUBER * batch.spread_log for sign in (-1, 1))
        total, count, weight = prior * batch.mean_log, prior, 1.0
        for answers in (group.finished, *group.history):
            total += weight * sum(min(max(log(max(tokens, 1)), low), high) for tokens in answers)
            count += weight * len(answers)
            weight *= self.history_weight
        mean, count = _posterior(total, count, [log(tokens) for tokens in group.running if tokens], spread)
        left = _mean_beyond(mean, spread * sqrt(1 + 1 / count), generated)
        return _within(group, generated, ceil(min(left, group.max_tokens)))


class Belief(BaseModel):
    """A belief for each prompt and sample: history is its prior; finished and running mates are its evidence.

    A running mate counts by the chance that an answer gets as far (survival). Lengths have normal scores by the batch's
    law; a prompt's level is filtered from epoch to epoch. `lanes` plans by `left`, which knows the lengths of the last
    step too; `expected` takes the log-normal law of the batch, as `shrunk` does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["belief"] = "belief"
    file_keys: ClassVar[tuple[str, ...]] = ()
    reads_all: ClassVar[bool] = True
    quantile: float = Field(0.5, gt=0.0, lt=1.0, description="of a remainder, by which lanes sort samples")
    min_answers: int = Field(32, ge=2, description="known answers below which lanes believe nothing")

    def expected(self, group: LengthsView, generated: int) -> int:
        batch = group.batch
        if not batch.answers:
            return _within(group, generated, group.max_tokens)
        law = LengthLaw.log_normal(batch.mean_log, batch.spread_log, 1 - batch.between_share, group.max_tokens)
        level = law.level(group.history)
        made = np.array([generated, *_others(group.running, generated)], np.int64)
        zeros = np.zeros(len(group.finished), np.int64)
        view = BeliefView(
            level_mean=np.array(level[:1]),
            level_variance=np.array(level[1:]),
            finished=np.array(group.finished, np.int64),
            finished_group=zeros,
            group=np.zeros(len(made), np.int64),
            made=made,
            max_tokens=np.full(len(made), group.max_tokens),
        )
        return _within(group, generated, generated + ceil(self.left(law, view).mean[0]))

    def left(self, law: LengthLaw, view: BeliefView, draws: int = 0) -> Remainders:
        """Returns what samples still make: mean, quantile, and `draws` draws; see `Remainders`."""
        return remainders(law, view, self.quantile, draws)


def _others(running: tuple[int, ...], generated: int) -> list[int]:
    """Returns the tokens of a sample's running mates: all but one of those that have as many as it has."""
    others = list(running)
    if generated in others:
        others.remove(generated)
    return others


def _posterior(total: float, count: float, beyond: list[float], spread: float) -> tuple[float, float]:
    """Returns the mean log length, and the number of answers behind it: `count` that add up to `total`, and one beyond
    each of `beyond`.

    Three rounds of EM (each running answer at its own expectation) come within 1 % of the fixed point.
    """
    mean, known = total / count, {at: beyond.count(at) for at in beyond}
    for _ in range(3 if known else 0):
        unseen = sum(many * (mean + spread * _hazard((at - mean) / spread)) for at, many in known.items())
        mean = (total + unseen) / (count + len(beyond))
    return mean, count + len(beyond)


def _hazard(z: float) -> float:
    """Returns density over survival of the standard normal: the mean of values beyond z."""
    return exp(-z * z / 2) / sqrt(2 * pi) / _survival(z) if z < 8 else z + 1 / z


def _survival(z: float) -> float:
    return erfc(z / sqrt(2)) / 2


def _mean_beyond(mean: float, spread: float, tokens: int) -> float:
    """Returns the mean of a log-normal length that is greater than `tokens`."""
    whole = exp(mean + spread * spread / 2)
    if not tokens:
        return whole
    z = (log(tokens) - mean) / spread
    if z > 8:
        return tokens * (1 + spread / max(z - spread, 1.0))
    return whole * _survival(z - spread) / _survival(z)


def _within(group: LengthsView, generated: int, tokens: int) -> int:
    return max(min(tokens, group.max_tokens), generated + 1)


def class_starts(group: LengthsView) -> tuple[int, int]:
    """Returns the numbers of answer tokens from which a sample of the group counts as medium, and as long (DAS 4.2).

    Its first class is the commonest of earlier answers to the prompt, or of finished mates if there are none.
    """
    known = [*chain(*group.history)] or group.finished
    classes = group.batch.classes
    return classes.starts[classes.first(known) if known else LONG]


def length_class(group: LengthsView, generated: int) -> int:
    """Returns the class of a sample of the group that has `generated` tokens: 0 short, 1 medium, 2 long."""
    medium_at, long_at = class_starts(group)
    return (generated >= medium_at) + (generated >= long_at)


LengthsPolicy = Annotated[
    MaxFinished | HistoryQuantile | LengthClassEstimate | Shrunk | Belief, Field(discriminator="type")
]
