"""The learner of a simulated training: rewards of ended groups, and pieces of a step's gradient in order.

Invariants: steps are trained on one after another; each group is in one piece. A piece holds groups with rewards,
without a gap, in an order that is fixed before the step: by expected length, then by place. Called by `TrainingHost`,
which has the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tailrace.lab.simulator.types import WorkloadGroup


@dataclass(slots=True)
class StepProgress:
    """`order`: groups in the order of training. `taken`: number of groups in pieces so far. `trained`: number of groups
    in pieces that are trained on. `scored`: ids of groups with rewards.
    """

    order: list[WorkloadGroup]
    unended: int
    taken: int = 0
    trained: int = 0
    scored: set[str] = field(default_factory=set)


class Learner:
    """`piece_tokens`: minimum tokens of a piece, except the last one; None: a step is one piece. `late`: rewards begin
    once all groups of the step have ended.
    """

    def __init__(
        self, steps: Sequence[Sequence[WorkloadGroup]], reward_sample_s: float, piece_tokens: float | None, late: bool
    ):
        self.steps = [StepProgress(fixed_order(groups), len(groups)) for groups in steps]
        self._step_of_group: dict[str, int] = {}
        self._reward_sample_s, self._piece_tokens, self._late = reward_sample_s, piece_tokens, late
        self._scorers_free_s = 0.0
        self.version = 0  # steps trained on
        self.trained_in: dict[tuple[int, str], int] = {}  # by the step that a group came with and its id

    def ended(self, step: int, group: WorkloadGroup, now: float) -> list[tuple[float, WorkloadGroup]]:
        """Returns the groups whose rewards begin now that `group` has ended, each with the time at which it has its
        reward.
        """
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
        """Moves an unended group to the next step, where it is trained on last."""
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
        """Takes the step's next piece, and returns its groups; empty while too few are scored."""
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
        """Records that a piece is trained on. Returns whether its whole step is trained on."""
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
    """Returns the groups by mean length in the last epoch, shortest first. Groups without history come last, in the
    order given.
    """

    def expected(group: WorkloadGroup) -> float:
        past = group.past_lengths[0] if group.past_lengths else ()
        return sum(past) / len(past) if past else float("inf")

    return sorted(groups, key=expected)
