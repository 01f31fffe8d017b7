"""Settings of the draft index, in a separate file so that reading a configuration compiles nothing."""

from pydantic import BaseModel, ConfigDict, Field


class IndexSettings(BaseModel):
    """Settings of the draft index."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_context: bool = True
    """Draft from group mates; off: from the sample itself and history only."""

    history: bool = True
    """Draft from answers of earlier epochs."""

    other_prompts: bool = True
    """Draft from answers to other prompts too, by the phrases they share. Needs `group_context`."""

    learning: bool = True
    """Learn the weights of evidence from tokens that prove right."""

    reward_weight: float = Field(default=0.5, ge=0)
    """Spread of the weights by reward: an answer of reward r has the factor 1 + reward_weight * (r - 0.5)."""

    epoch_decay: float = Field(default=0.9, gt=0, le=1)
    """Factor on an answer's weight for each epoch of age."""
