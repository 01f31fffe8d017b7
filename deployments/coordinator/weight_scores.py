"""The scores of the replicas' weights, and which replicas they set aside: see `deployments.messages.scores`.

A replica is compared with the score that most replicas had first under these weights, to the bit at exactness `bits`,
and with the trainer's own score if it gave one. One whose score is too far from either is lost to the core until it has
loaded again and agrees. Two replicas that differ set nobody aside: neither is known to be right. Owned by `Weights`.
"""

import logging
from collections.abc import Callable, Iterable

import numpy as np

from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.scores import TOLERANCE, Score, apart
from tailrace.policies.protocol.exactness import Exactness


class WeightScores:
    """`unlike`: by replica that is set aside, why. `found`: what else the scores have shown, by replica."""

    def __init__(self, exactness: Callable[[], Exactness]):
        self._exactness = exactness
        self.begin()

    def begin(self) -> None:
        """Starts with new weights."""
        self._trainers: Score = ()
        self.unlike: dict[str, str] = {}
        self.found: dict[str, str] = {}
        self.scores: dict[str, Score] = {}  # by replica, the present ones
        self._first: dict[str, Score] = {}  # by replica, also of those that have left
        self._reports: list[EngineStats] = []
        self._seen: tuple | None = None  # tolerance and scores, as last compared

    def believe(self, trainers: Score) -> None:
        """Takes the trainer's own score of these weights."""
        self._trainers, self._seen = trainers, None
        self.observe(self._reports)

    def observe(self, reports: Iterable[EngineStats]) -> None:
        """Compares the scores of replicas that hold the wanted weights."""
        self._reports = [one for one in reports if one.score]
        scores = {one.replica_id: one.score for one in self._reports}
        if (seen := (self._tolerance, scores)) == self._seen:
            return
        self._seen, self.scores, self._first = seen, scores, scores | self._first
        usual = self._usual()
        self._name("unlike", {one: why for one, score in scores.items() if (why := self._why(score, usual))})
        drifts = {one.replica_id: one.score_drift for one in self._reports if one.score_drift > self._tolerance}
        found = {one: f"its former weights had changed in place, by {drift:.3g} nats" for one, drift in drifts.items()}
        if usual is None and not self._trainers:
            found |= dict.fromkeys(scores, "no score of these weights is that of most replicas: none is set aside")
        self._name("found", found)

    @property
    def problem(self) -> str | None:
        """Which replicas are set aside, and why, in one line."""
        return "; ".join(f"{name} is set aside: {why}" for name, why in sorted(self.unlike.items())) or None

    @property
    def _tolerance(self) -> float:
        return 0.0 if self._exactness() == "bits" else TOLERANCE

    def _usual(self) -> Score | None:
        """Returns the score that most replicas had first, or None. Where most agree, their median is within them."""
        first = list(self._first.values())
        if len({len(one) for one in first}) != 1:  # none, or odd ones
            return None
        usual = tuple(np.median(first, axis=0).tolist())
        agree = sum(1 for one in first if apart(one, usual) <= self._tolerance)
        return usual if 2 * agree > len(first) else None

    def _why(self, score: Score, usual: Score | None) -> str | None:
        if self._trainers and (far := apart(score, self._trainers)) > TOLERANCE:
            return f"the score of its weights is {far:.3g} nats from the trainer's"
        if usual is not None and (far := apart(score, usual)) > self._tolerance:
            return f"the score of its weights is {far:.3g} nats from that of most replicas"
        return None

    def _name(self, kind: str, found: dict[str, str]) -> None:
        """Records what was found, and logs what is new."""
        for name, why in sorted(found.items() - getattr(self, kind).items()):
            logging.getLogger(__name__).error("%s: %s", name, why)
        setattr(self, kind, found)
