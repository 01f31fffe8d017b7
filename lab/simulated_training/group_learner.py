"""The learner of the mode `bounded_groups`: gradients of whole groups as they end, whatever step they came from.

Invariants: each group is trained on once, within the limit of `GroupTurns`; all steps have the same number of groups.
Called by `TrainingHost`.
"""

from collections.abc import Sequence

from tailrace.lab.simulated_training.learner import Learner, trained_tokens
from tailrace.lab.simulator.types import WorkloadGroup
from tailrace.policies.models.group_turns import GroupTurns


class GroupLearner(Learner):
    """`ahead`: maximum number of updates between the admission of a group and its use."""

    def __init__(
        self, steps: Sequence[Sequence[WorkloadGroup]], reward_sample_s: float, piece_tokens: float, ahead: int
    ):
        super().__init__(steps, reward_sample_s, piece_tokens, late=False)
        self._size = len(steps[0])
        self._turns = GroupTurns(self._size, ahead)
        self._groups = {(step, group.group_id): group for step, groups in enumerate(steps) for group in groups}
        self._waiting = list(self._groups)[::-1]  # groups not admitted yet, the next one last
        self._scored: set[tuple[int, str]] = set()
        self._picked: list[WorkloadGroup] = []  # groups of the next piece
        self._done = 0  # groups of the present step in pieces that are trained on

    def admitted(self) -> list[tuple[int, WorkloadGroup]]:
        """Admits the groups that may begin now, and returns them, each with the step that it comes from."""
        found = []
        while self._waiting and self._turns.room > 0:
            key = self._waiting.pop()
            self._turns.admit(key)
            found.append((key[0], self._groups[key]))
        return found

    def scored(self, step: int, group_id: str) -> None:
        self._scored.add((step, group_id))

    def next_piece(self) -> list[WorkloadGroup]:
        while (key := self._turns.take(self._scored)) is not None:
            self._scored.discard(key)
            self._picked.append(self._groups[key])
            self.trained_in[key] = self.version
        enough = sum(map(trained_tokens, self._picked)) >= self._piece_tokens
        if not self._picked or not (enough or self._turns.taken == self._size):
            return []
        piece, self._picked = self._picked, []
        return piece

    def trained(self, piece: list[WorkloadGroup]) -> bool:
        self._done += len(piece)
        if self._done < self._size:
            return False
        self._turns.end_step()
        self._done, self.version = 0, self.version + 1
        return True
