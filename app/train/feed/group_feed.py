"""The samples of a run in the mode `bounded_groups`: groups are begun one by one, and a step takes whole ones as they
end.

Invariants: each group is trained on once, at most `ahead` updates after its begin, see `GroupTurns`. What could become
too old is not begun, and nothing that has begun is cancelled. A run that continues begins anew what it had not trained
on, since tokens of an earlier start would be older than their group's deadline tells.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import groupby, product
from queue import Empty, SimpleQueue

from tailrace.app.train.feed.running_step import RunningStep
from tailrace.app.train.feed.step_feed import Place, StepFeed
from tailrace.deployments.messages.rollout import GroupResult
from tailrace.policies.models.group_turns import GroupTurns

LOOK_S = 1.0
"""Seconds between two looks for an error of a rollout; a group that ends is taken at once."""


class TakenGroups:
    """The groups that a step of training has taken so far, and the question of each."""

    def __init__(self):
        self.questions: list[Place] = []
        self.groups: list[GroupResult] = []

    @property
    def ended(self) -> frozenset[int]:
        """Places of the groups, which are numbered as they are taken."""
        return frozenset(range(len(self.groups)))

    def group(self, place: int) -> GroupResult:
        """Returns the group at a place."""
        return self.groups[place]


class GroupFeed(StepFeed):
    """`size`: groups of a step. `trained`: questions that earlier starts of the run have trained on. `keep`: called
    with each step and its groups once it is trained on. `of_steps`: arguments of `StepFeed`.
    """

    def __init__(
        self,
        *,
        size: int,
        trained: Collection[Place],
        keep: Callable[[int, Sequence[GroupResult]], None],
        **of_steps,
    ):
        super().__init__(**of_steps)
        self._size, self._keep, self._begin_rewards = size, keep, self._on_group
        self._on_group = self._arrive
        self._turns = GroupTurns(size, self._lookahead.ahead, version=len(trained) // size)
        self._waiting = [one for one in product(range(self._steps), range(size)) if one not in trained][::-1]
        self._arrived: SimpleQueue[GroupResult] = SimpleQueue()
        self._ended: dict[Place, GroupResult] = {}
        self._taken = TakenGroups()

    def begin(self, step: int) -> TakenGroups:
        """Sends the trainer's weights, and begins the groups that may begin now. Returns the step's groups."""
        self.send_weights(step)
        self._taken = TakenGroups()
        self._begin_groups()
        return self._taken

    def next_group(self, running: TakenGroups, known: int) -> None:
        """Waits for a group that may be trained on now, takes it, and begins others in its place."""
        with self._counting("rollout"):
            self._look(0.0)
            while (question := self._turns.take(self._ended)) is None:
                self._look(LOOK_S)
        running.questions.append(question)
        running.groups.append(self._ended.pop(question))
        self._begin_groups()

    def question_of(self, step: int, place: int) -> Place:
        return self._taken.questions[place]

    def end(self, step: int) -> None:
        self._turns.end_step()
        self.taken = tuple(self._taken.questions)
        self._keep(step, self._taken.groups)

    def settle(self) -> None:
        """Does nothing: samples have no step to wait for, and a run that continues makes those in flight again."""

    def _begin_groups(self) -> None:
        begun = []
        while self._waiting and self._turns.room > 0:
            begun.append(self._waiting.pop())
            self._turns.admit(begun[-1])
        for step, questions in groupby(begun, key=lambda question: question[0]):
            places = [place for _, place in questions]
            self._running[step * self._size + places[0]] = self._started(step, places)

    def _arrive(self, group: GroupResult) -> None:
        """Takes a group that has ended, on the thread of its rollout."""
        self._begin_rewards(group)
        self.ended_at[group.step, int(group.prompt_id)] = self._updates
        self._arrived.put(group)

    def _look(self, timeout_s: float) -> None:
        """Waits for a group, and takes all that have arrived. Raises the error of a rollout."""
        with suppress(Empty):
            group = self._arrived.get(timeout=timeout_s)
            while True:
                self._ended[group.step, int(group.prompt_id)] = group
                group = self._arrived.get_nowait()
        self._running = {number: one for number, one in self._running.items() if not _is_over(one)}


def _is_over(running: RunningStep) -> bool:
    """Returns whether a rollout has ended. Raises its error."""
    over = running.is_over
    running.wait(0, 0.0)
    return over
