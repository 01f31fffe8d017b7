"""The core under watch: each decision is compared with the laws of order and of room.

Laws: no sample starts in a place where a waiting sample fits whose batch comes first, by priority, then by running
tokens for its share. No sample that could run before a decision waits after it while it fits on a ready replica. The
real coordinator calls it as its core.
"""

from collections.abc import Iterable

from tailrace.policies.core.fit_queue import STEP_TOKENS
from tailrace.policies.core.request_buffer import Batch, Sample
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.sample_states import WAITING
from tailrace.policies.families.fairness import FairShares
from tailrace.policies.protocol.actions import Action, StartChunk
from tailrace.policies.protocol.events import Tick


class WatchedCore(RolloutCore):
    """The core. `defects`: defects of the run, to which a breach is added."""

    def __init__(self, defects: list[str], *core):
        super().__init__(*core)
        self._defects = defects
        self._is_fair = isinstance(self.policies.fairness, FairShares)

    def decide(self, tick: Tick) -> tuple[Action, ...]:
        able = self._able() if self.counts()["waiting"] else {}
        tokens = {sample.group.batch: sample.group.batch.running_tokens for sample in able.values()}
        actions = super().decide(tick)
        if able:
            started = [one for one in actions if isinstance(one, StartChunk) and one.copy_of is None]
            self._check_turns(able, tokens, started)
            self._check_left(able)
            self._check_homes(able)
        return actions

    def _able(self) -> dict[str, Sample]:
        """Returns the samples that wait only for room, by id."""
        waiting = (sample for sample in self.samples() if sample.state is WAITING)
        return {one.sample_id: one for one in waiting if self.awaited.by(one).startswith("room")}

    def _check_turns(self, able: dict[str, Sample], tokens: dict[Batch, int], started: Iterable[StartChunk]) -> None:
        """Checks the order of the started samples. `tokens`: KV of running chunks by batch, before the decision."""
        free = {name: sample for name, sample in able.items() if sample.place is None} if self._is_fair else {}
        for start in started:
            sample = self.sample(start.sample_id)
            if free.pop(start.sample_id, None) is not None:
                turn = _turn(sample.group.batch, tokens)
                for other in free.values():
                    if _steps(other) <= _steps(sample) and (first := _turn(other.group.batch, tokens)) < turn:
                        about = f"{start.sample_id} began, of turn {turn}, while {other.sample_id} waited"
                        self._defects.append(f"{about}, of {first}")
                        return
            if sample.group.batch in tokens:
                tokens[sample.group.batch] += sample.need_tokens

    def _check_left(self, able: dict[str, Sample]) -> None:
        """Checks that the samples that still wait have no room."""
        roomiest = self.replicas.roomiest()
        most = self.replicas.room_tokens(roomiest) if roomiest is not None else 0
        for sample in able.values():
            if sample.state is WAITING and self.awaited.by(sample).startswith("room"):
                room = most if sample.place is None else self._room_at(sample.place)
                if _steps(sample) * STEP_TOKENS <= room:
                    self._defects.append(
                        f"{sample.sample_id} waits for {sample.need_tokens} tokens of KV, {room} are free"
                    )
                    return

    def _check_homes(self, able: dict[str, Sample]) -> None:
        """Checks that samples of one group wait for one replica."""
        for sample in able.values():
            if sample.state is WAITING and sample.group.home not in (None, sample.home):
                self._defects.append(f"{sample.sample_id} waits for {sample.home}, its group for {sample.group.home}")
                return

    def _room_at(self, home: str | int) -> int:
        if isinstance(home, int):  # older weights
            return max(map(self.replicas.own_room_tokens, self._drain.open_to(home)), default=0)
        return self.replicas.room_tokens(home) if home in self.replicas.ready() else 0


def _steps(sample: Sample) -> int:
    """Returns the steps of KV that a sample needs, as the queues count them."""
    return -(-sample.need_tokens // STEP_TOKENS)


def _turn(batch: Batch, tokens: dict[Batch, int]) -> tuple[int, float]:
    return -batch.priority, tokens[batch] / batch.share
