"""Accuracy of a run on held-out questions, at one step."""

from pydantic import BaseModel, ConfigDict


class Accuracy(BaseModel):
    """Mean reward of greedy answers after `step` steps. `standard_error`: of that mean, over the questions."""

    model_config = ConfigDict(frozen=True)
    step: int
    mean: float
    standard_error: float
    questions: int
