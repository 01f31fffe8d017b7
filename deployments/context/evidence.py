"""How far each kind of evidence is to be trusted: learned online, shared by all groups of an engine.

Called by index.py, which hands over what was drafted and what came instead.
"""

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from deployments.context.kernels import REACH


class IndexSettings(BaseModel):
    """Knobs of the draft index."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_context: bool = True
    """Draft from group mates; off: from the sample itself and history only."""

    history: bool = True
    """Draft from answers of earlier epochs."""

    learning: bool = True
    """Let the weights of evidence follow what proves right."""

    reward_weight: float = Field(default=0.5, ge=0)
    """How much more an answer of reward 1 counts than one of reward 0: a factor of 1 + reward_weight."""

    epoch_decay: float = Field(default=0.9, gt=0, le=1)
    """Factor on an answer's weight for each epoch of age."""

    shared_ngrams: bool = False
    """Fall back on short contexts over all groups of this engine."""


class Evidence:
    """Weights of evidence by (source, match length in tokens)."""

    def __init__(self, settings: IndexSettings = IndexSettings()):  # noqa: B008 -- frozen
        self.settings = settings
        lengths = np.minimum(np.arange(REACH + 1), 9)
        self.table = np.repeat((3.0 ** (lengths - 4))[None], 4, axis=0)
