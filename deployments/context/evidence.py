"""How far each kind of evidence is to be trusted: learned online, shared by all groups of an engine.

Called by index.py, which hands over what was drafted and what came instead.
"""

import numpy as np

from deployments.context.kernels import REACH
from deployments.context.settings import IndexSettings


class Evidence:
    """Weights of evidence by (source, match length in tokens)."""

    def __init__(self, settings: IndexSettings = IndexSettings()):  # noqa: B008 -- frozen
        self.settings = settings
        lengths = np.minimum(np.arange(REACH + 1), 9)
        self.table = np.repeat((3.0 ** (lengths - 4))[None], 4, axis=0)
