"""Weights of evidence: a small network, learned online and shared by all groups of an engine.

It starts from `scorer_weights.json`, which `bench drafts --fit` made from recorded rollouts.
It then learns from drafts and the tokens that were really emitted.
Its inputs (scorer_kernels.py) describe matches, alignments and counts, never tokens.
Used by group_index.py, on one thread.
"""

import json
from pathlib import Path

import numpy as np

from tailrace.deployments.draft_index.alignment_state import TrainingExample
from tailrace.deployments.draft_index.match_kernels import REACH, ROOM
from tailrace.deployments.draft_index.phrase_kernels import COLUMNS, SLOTS, note
from tailrace.deployments.draft_index.scorer_kernels import FEATURES, HIDDEN
from tailrace.deployments.draft_index.scorer_training import learn, learn_all
from tailrace.deployments.draft_index.settings import IndexSettings

PRIOR = Path(__file__).with_name("scorer_weights.json")

LEARNING_RATE = np.float32(1e-3)
LESSONS = 4
"""Number of drafts per draft that is learned from: the others would cost time and teach the same."""

MOST_TOKENS = 64
"""Maximum tokens of a draft."""

TOGETHER = 16
"""Samples drafted for in one call: the call's working data stays in the second-level cache."""


class CandidateScorer:
    """The network, and the scratch space of the indexes that use it."""

    def __init__(self, settings: IndexSettings = IndexSettings(), prior: Path | None = None):  # noqa: B008 -- frozen
        self.settings = settings
        weights = json.loads((prior or PRIOR).read_text())
        array = {name: np.array(values, np.float32, ndmin=2) for name, values in weights.items()}
        self.norm = (array["mean"][0], array["scale"][0])
        self.net = (array["inner"], array["offset"], array["outer"], array["none"])
        assert self.net[0].shape == (FEATURES, HIDDEN)
        self.found = np.empty((TOGETHER, 2 * ROOM, 5), np.int32)
        self.scores = np.empty((TOGETHER, 2 * ROOM, 2), np.float32)
        self.told = np.empty((TOGETHER, 3), np.int64)
        self.recent = np.empty((TOGETHER, REACH), np.int32)
        self.phrases = (np.zeros((SLOTS, COLUMNS), np.int32), np.zeros((2, COLUMNS), np.int32))
        self._ahead: dict[int, np.ndarray] = {}

    def ahead(self, most: int) -> np.ndarray:
        """Returns room for the next tokens of each place, int32[TOGETHER, places, tokens]."""
        if most not in self._ahead:
            self._ahead[most] = np.empty((TOGETHER, 2 * ROOM, most), np.int32)
        return self._ahead[most]

    def note(self, tokens: np.ndarray) -> None:
        """Counts tokens (i32[n], one after the other) in the phrase table."""
        if self.settings.other_prompts:
            note(self.phrases[0], tokens)

    def forget(self) -> None:
        """Empties the phrase table."""
        self.phrases[0][:] = 0

    def learn(self, lesson: TrainingExample, truth: np.ndarray) -> None:
        """Learns from the tokens (i32[n]) that were really emitted where the draft of `lesson` began."""
        if self.settings.learning:
            learn(lesson.features, lesson.seen, truth, self.net, LEARNING_RATE)

    def learn_all(self, features, seen, rows, tokens, begins, ends) -> None:
        """Learns from n drafts, those of `rows` (i64[n]) of `AlignmentState`; tokens[begins[i]:ends[i]] followed."""
        if self.settings.learning:
            learn_all(features, seen, rows, tokens, begins, ends, self.net, LEARNING_RATE)
