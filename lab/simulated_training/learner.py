"""The learner of a simulated training: rewards of ended groups, and pieces of a step's gradient in order.

Invariants: steps are trained one after another; each group is in one piece; a piece holds groups that are scored, in an
order fixed before the step (by expected length, then by place), with no gap. Called by `TrainingHost`, which has the
clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tailrace.lab.simulator.types import WorkloadGroup


@dataclass(slots=True)
class StepProgress:
    """`order`: groups as they are trained on. `taken`: those in pieces so far. `scored`: with rewards."""

    order: list[WorkloadGroup]
    unended: int
    taken: int = 0
    trained: int = 0
    scored: set[str] = field(default_factory=set)


class Learner:
    """`piece_tokens`: minimum tokens of a piece, except the last one. Without it a step is one piece."""

    def __init__(
        self, steps: Sequence[Sequence[WorkloadGroup]], reward_sample_s: float, piece_tokens: float | None, late: bool
    ):
        self.steps = [StepProgress(fixed_order(groups), len(groups)) for groups in steps]
        self._step_of_group: dict[str, int] = {}
        self._reward_sample_s, self._piece_tokens, self._late = reward_sample_s, piece_tokens, late
        self._scorers_free_s = 0.0
        self.version = 0  # steps trained on
        self.trained_in: dict[tuple[int, str], int] = {}  # by the step that a group came with, and its id

    def ended(self, step: int, group: WorkloadGroup, now: float) -> list[tuple[float, WorkloadGroup]]:
        """Returns groups whose rewards begin now that this one has ended, each with the time at which it is scored."""
        progress = self.steps[step]
        progress.unended -= 1
        if self._late and progress.unended:
            return []
        found = []
        for each in progress.order if self._late else [group]:
            self._scorers_free_s = max(self._scorers_free_s, now) + len(each.lengths) * self._reward_sample_s
            found.append((self._scorers_free_s, each))
        return found

    def put_off(self, step: int, group: WorkloadGroup) -> None:
        """Counts an unended group to the next step: it is trained on last there."""
        before, after = self.steps[step], self.steps[step + 1]
        self.trained_in[step, group.group_id] = step + 1
        before.order.remove(group)
        before.unended -= 1
        after.order.append(group)
        after.unended += 1

    def scored(self, step: int, group_id: str) -> None:
        """Records that a group has its rewards."""
        self.steps[step].scored.add(group_id)

    def next_piece(self) -> list[WorkloadGroup]:
        """Returns the groups of the step's next piece; empty while too few are scored."""
        if self.version == len(self.steps):
            return []
        progress, piece, tokens = self.steps[self.version], [], 0
        rest = progress.order[progress.taken :]
        for group in rest:
            if group.group_id not in progress.scored:
                break
            piece.append(group)
            tokens += trained_tokens(group)
        whole = len(piece) == len(rest)
        enough = self._piece_tokens is not None and tokens >= self._piece_tokens
        if not piece or not (whole or enough):
            return []
        progress.taken += len(piece)
        return piece

    def trained(self, piece: list[WorkloadGroup]) -> bool:
        """Records that a piece is trained. Returns whether the step is."""
        progress = self.steps[self.version]
        progress.trained += len(piece)
        if progress.trained < len(progress.order):
            return False
        self.version += 1
        return True


def trained_tokens(group: WorkloadGroup) -> int:
    """Returns the tokens that a gradient of the group computes: prompts and answers."""
    return group.prompt_tokens * len(group.lengths) + sum(group.lengths)


def fixed_order(groups: Sequence[WorkloadGroup]) -> list[WorkloadGroup]:
    """Returns the groups by mean length in the last epoch, shortest first; those without history in the given order,
    last.
    """

    def expected(group: WorkloadGroup) -> float:
        past = group.past_lengths[0] if group.past_lengths else ()
        return sum(past) / len(past) if past else float("inf")

    return sorted(groups, key=expected)
