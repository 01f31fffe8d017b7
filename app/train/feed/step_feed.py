"""The samples of a run's steps in the order of training, made as far ahead as the mode allows.

Invariant: tokens are functions of the seed, the step, the place of the question, the sample's index and the weights.
Only in `bounded` and `bounded_groups` does the time of an update decide which weights these are, and then each token's
version is known.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

from tailrace.app.calls.client import RolloutClient
from tailrace.app.train.feed.modes import Lookahead
from tailrace.app.train.feed.running_step import RunningStep
from tailrace.app.trl.weights_sender import WeightsSender
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch

Place = tuple[int, int]
"""A question of a run: its step, and its place there."""

Groups = Callable[[int], Sequence[PromptGroup]]
"""Prompts of a step, by place; `prompt_id` is the place."""


class StepFeed:
    """`groups_of`: returns prompts of a step. `roll_out`: yields groups of a batch. `on_group`: called with each as it
    ends.

    `steps`: steps of the whole run; nothing is started beyond.
    """

    def __init__(
        self,
        *,
        client: RolloutClient,
        weights: WeightsSender,
        lookahead: Lookahead,
        groups_of: Groups,
        roll_out: Callable[[RolloutBatch], Iterator[GroupResult]],
        on_group: Callable[[GroupResult], None],
        steps: int,
        seed: int,
    ):
        self._client, self._weights, self._lookahead = client, weights, lookahead
        self._groups_of, self._roll_out, self._on_group = groups_of, roll_out, on_group
        self._steps, self._seed = steps, seed
        self._running: dict[int, RunningStep] = {}
        self._seconds: Counter[str] = Counter()
        self._updates = 0  # of the weights that the service has
        self.ended_at: dict[Place, int] = {}  # of each group: updates that the service had as it ended
        self.taken: tuple[Place, ...] = ()  # questions of the last step, if they are not those of its number

    def begin(self, step: int) -> RunningStep:
        """Sends the trainer's weights, starts all that may start, and returns the step's samples."""
        if self._lookahead.drains:
            self.settle()
        self.send_weights(step)
        for each in range(step, min(step + self._lookahead.ahead + 1, self._steps)):
            if each not in self._running:
                self._running[each] = self._started(each)
        running = self._running[step]
        if self._lookahead.whole:
            with self._counting("rollout"):
                running.wait_for_all()
        return running

    def send_weights(self, updates: int) -> None:
        """Sends the trainer's present weights to the service. `updates`: number of optimizer updates that they have."""
        with self._counting("weights"):
            self._weights.send()
        self._updates = updates

    def next_group(self, running: RunningStep, known: int) -> None:
        """Waits for more than `known` groups of a step."""
        with self._counting("rollout"):
            running.wait(known)

    def question_of(self, step: int, place: int) -> Place:
        """Returns which question a step of training has at a place."""
        return step, place

    def end(self, step: int) -> None:
        """Removes a step that has been trained."""
        self.ended_at = {(step, place): at for place, at in self._running.pop(step).ended_at.items()}

    def settle(self) -> None:
        """Waits until all samples that have started have ended."""
        with self._counting("rollout"):
            for running in self._running.values():
                running.wait_for_all()

    def take_seconds(self) -> Counter[str]:
        """Returns the seconds for which the trainer has waited since the last call: `rollout` and `weights`."""
        taken, self._seconds = self._seconds, Counter()
        return taken

    def close(self) -> None:
        """Ends the samples that run."""
        for running in self._running.values():
            running.stop()
        self._running.clear()

    @contextmanager
    def _counting(self, kind: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[kind] += time.monotonic() - started

    def _started(self, step: int, places: Sequence[int] | None = None) -> RunningStep:
        """Starts the samples of a step, or of the questions at these places."""
        groups = self._groups_of(step)
        batch = RolloutBatch(
            batch_id=f"step-{step}-{os.getpid()}-{uuid4().hex[:6]}",
            groups=tuple(groups if places is None else map(groups.__getitem__, places)),
            step=step,
            seed=self._seed,
            priority=-step,
            weights_version=self._weights.version if self._lookahead.drains else None,
        )
        return RunningStep(batch, self._roll_out, self._on_group, self._client.cancel_blocking, lambda: self._updates)
