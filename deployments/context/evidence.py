"""How far evidence is to be trusted: a small network, learned online and shared by all groups of an engine.

It begins as `prior.json`, which `bench drafts --fit` made from recorded rollouts; each draft that is followed by
what really came teaches it a little. Its inputs (choice.py) speak of matches, alignments and counts, never of tokens.
Used by index.py, on one thread.
"""

import json
from pathlib import Path

import numpy as np

from deployments.context.choice import CANDIDATES, FEATURES, HIDDEN
from deployments.context.kernels import ROOM
from deployments.context.lesson import learn
from deployments.context.settings import IndexSettings

PRIOR = Path(__file__).with_name("prior.json")

LEARNING_RATE = np.float32(1e-3)
LESSONS = 4
"""One draft in this many is learned from: the others would cost time and teach the same."""

MOST_TOKENS, NOTED_TOKENS = 64, 8
"""Tokens that a draft may have, and those of it that are learned from."""


class Lesson:
    """What the first path of a draft was chosen from: features of each position's candidates, and which they were."""

    __slots__ = ("features", "position", "seen")

    def __init__(self):
        self.features = np.zeros((NOTED_TOKENS, CANDIDATES, FEATURES), np.float32)
        self.seen = np.zeros((NOTED_TOKENS, CANDIDATES + 1), np.int32)
        self.position = -1


class Evidence:
    """The network, and the scratch space of the indexes that use it."""

    def __init__(self, settings: IndexSettings = IndexSettings()):  # noqa: B008 -- frozen
        self.settings = settings
        prior = json.loads(PRIOR.read_text())
        array = {name: np.array(values, np.float32, ndmin=2) for name, values in prior.items()}
        self.norm = (array["mean"][0], array["scale"][0])
        self.net = (array["inner"], array["offset"], array["outer"], array["none"])
        assert self.net[0].shape == (FEATURES, HIDDEN)
        self.found = np.empty((2 * ROOM, 5), np.int32)
        self.scores = np.empty((2 * ROOM, 2), np.float32)
        self.ahead = np.empty((2 * ROOM, MOST_TOKENS), np.int32)

    def learn(self, lesson: Lesson, truth: np.ndarray) -> None:
        """Take in what really came (i32[n]) where the draft of `lesson` began."""
        if self.settings.learning:
            learn(lesson.features, lesson.seen, truth, self.net, LEARNING_RATE)
