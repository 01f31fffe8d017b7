"""Accuracy of a run on held-out questions, at one step."""

from pydantic import BaseModel, ConfigDict


class Mean(BaseModel):
    """`standard_error`: standard error of the mean, over the questions."""

    model_config = ConfigDict(frozen=True)
    value: float
    standard_error: float


class Accuracy(BaseModel):
    """Mean rewards after `step` steps. `greedy`: mean of one answer at temperature 0. `sampled`: mean of `samples`
    answers to each question, drawn as in training; None if `samples` is 0.
    """

    model_config = ConfigDict(frozen=True)
    step: int
    questions: int
    samples: int
    greedy: Mean
    sampled: Mean | None


def described(accuracy: Accuracy) -> str:
    """Returns both means in words."""
    means = {"greedy": accuracy.greedy, "sampled": accuracy.sampled}
    found = (f"{name} {mean.value:.3f} +- {mean.standard_error:.3f}" for name, mean in means.items() if mean)
    return ", ".join(found)
