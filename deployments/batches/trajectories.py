"""Trajectories in progress: their turns, so that any gateway can go on with them.

Invariant: a turn is recorded once. A trajectory is here from its opening until it is ended or its time has passed; then
nothing of it is left. Called by the coordinator and its loop.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from tailrace.deployments.messages.rollout import Rejected, RejectedBy, checked
from tailrace.deployments.messages.trajectory import TrajectoryOpening, TrajectoryState, TrajectoryTurn

MAX_TRAJECTORIES = 16_384
"""Maximum number of trajectories in progress: one of 45 turns and 30,000 tokens takes 230 KB here."""


@dataclass(eq=False, slots=True)
class OpenTrajectory:
    """A trajectory in progress. `ends_s`: when it ends by itself, by the coordinator's clock."""

    opening: TrajectoryOpening
    ends_s: float
    turns: list[TrajectoryTurn] = field(default_factory=list)
    places: dict[tuple, int] = field(default_factory=dict)  # of turns, by what is unique to each

    def add(self, turn: TrajectoryTurn) -> int:
        prompt = blake2b(turn.prompt_token_ids.array.tobytes(), digest_size=16).digest()
        images = tuple(image.place for image in turn.images)
        place = self.places.setdefault((turn.parent, turn.turn, prompt, images), len(self.turns))
        if place == len(self.turns):
            self.turns.append(turn)
        return place


class HoldingSessions(Protocol):
    """See `OpenSessions`."""

    def end_trajectory(self, name: str, group: str, index: int, is_last: bool) -> None: ...

    def call(self, name: str, request: tuple[str, int, int], tool: str) -> None: ...

    def renew(self, name: str) -> bool: ...


class Trajectories:
    """`epoch`: this coordinator's name. `now`: returns seconds. `sessions`: hold the samples between turns.
    `send_reward`: as `ContextService.reward`; None without a context.
    """

    def __init__(
        self,
        epoch: str,
        now: Callable[[], float],
        sessions: HoldingSessions,
        send_reward: Callable[[str, int, dict[int, float]], object] | None = None,
    ):
        self._epoch, self._now, self._sessions, self._send_reward = epoch, now, sessions, send_reward
        self._open: dict[str, OpenTrajectory] = {}
        self._groups: Counter[tuple[str, str]] = Counter()  # number of them by session and group

    def __len__(self) -> int:
        return len(self._open)

    def open(self, opening: TrajectoryOpening, left_s: float, turns: tuple[TrajectoryTurn, ...]) -> Rejected | None:
        """Opens a trajectory for `left_s` seconds, or does nothing if it is open. `turns`: those that it had before a
        loss.
        """
        if isinstance(opening := checked(TrajectoryOpening, opening), Rejected):
            return opening
        if opening.trajectory_id in self._open:
            return None
        if len(self._open) >= MAX_TRAJECTORIES:
            return Rejected(reason=f"{MAX_TRAJECTORIES} trajectories are open; end some", by=RejectedBy.QUOTA)
        found = self._open[opening.trajectory_id] = OpenTrajectory(opening, self._now() + left_s)
        self._groups[opening.settings.batch_id, opening.group] += 1
        for turn in turns:
            found.add(turn)
        return None

    def read(self, name: str, epoch: str, known: int) -> TrajectoryState:
        """Returns a trajectory, without the first `known` turns if the asker knows them from this coordinator."""
        found = self._open.get(name)
        if found is None or found.ends_s <= self._now():
            return TrajectoryState(opening=None, epoch=self._epoch)
        turns = tuple(found.turns[known if epoch == self._epoch else 0 :])
        left_s = found.ends_s - self._now()
        return TrajectoryState(opening=found.opening, turns=turns, left_s=left_s, epoch=self._epoch)

    def add(self, name: str, epoch: str, turn: TrajectoryTurn) -> int | None:
        """Records a turn. Returns its place, or None if the trajectory has ended, or if the turn's parent is numbered
        by another coordinator.
        """
        found = self._open.get(name)
        if found is None or epoch != self._epoch:
            return None
        if turn.tool:
            opening = found.opening
            self._sessions.call(opening.settings.batch_id, (opening.group, opening.index, turn.turn), turn.tool)
        return found.add(turn)

    def end(self, name: str, reward: float | None = None) -> TrajectoryState:
        """Ends a trajectory and releases its KV. Returns all of it. Drafts of later epochs follow those with the better
        rewards.
        """
        state = self.read(name, "", 0)
        if state.opening is not None and reward is not None and self._send_reward is not None:
            for prompt_key in {turn.prompt_key for turn in state.turns}:
                self._send_reward(prompt_key, state.opening.settings.step, {state.opening.index: reward})
        if (found := self._open.pop(name, None)) is not None:
            place = found.opening.settings.batch_id, found.opening.group
            self._groups[place] -= 1
            if is_last := not self._groups[place]:
                del self._groups[place]
            self._sessions.end_trajectory(*place, found.opening.index, is_last)
        return state

    def sweep(self) -> None:
        """Ends trajectories whose time has passed. Sessions stay while one of theirs is open."""
        for session in {session for session, _ in self._groups}:
            self._sessions.renew(session)
        for name in [name for name, one in self._open.items() if one.ends_s <= self._now()]:
            self.end(name)
