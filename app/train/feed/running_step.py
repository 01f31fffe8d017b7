"""The samples of one step, rolled out on a thread while the trainer does other work."""

import threading
from collections.abc import Callable, Iterator

from tailrace.app.trl.step_rollout import check_answered
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch

CANCEL_S = 1.0
"""Seconds after which `stop` cancels again: a batch that is on its way to the service is unknown there at first."""


class RunningStep:
    """Starts at once. `roll_out`: yields the groups of a batch; `on_group`: called with each, on the thread.

    `cancel`: ends the batch with this id. `updates`: returns the updates of the weights that the service has. An error
    of the thread is raised by the next call that waits.
    """

    def __init__(
        self,
        batch: RolloutBatch,
        roll_out: Callable[[RolloutBatch], Iterator[GroupResult]],
        on_group: Callable[[GroupResult], None],
        cancel: Callable[[str], object],
        updates: Callable[[], int],
    ):
        self.batch = batch
        self._roll_out, self._on_group, self._cancel, self._updates = roll_out, on_group, cancel, updates
        self.ended_at: dict[int, int] = {}  # updates of the weights that the service had as each group ended, by place
        self._places = {group.prompt_id: place for place, group in enumerate(batch.groups)}
        self._groups: dict[int, GroupResult] = {}
        self._error: BaseException | None = None
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name=batch.batch_id)
        self._thread.start()

    @property
    def ended(self) -> frozenset[int]:
        """Places of the groups that have ended."""
        with self._changed:
            return frozenset(self._groups)

    @property
    def is_over(self) -> bool:
        """True if all groups have ended, or the rollout has failed."""
        with self._changed:
            return self._over

    def group(self, place: int) -> GroupResult:
        """Returns the ended group at a place."""
        with self._changed:
            return self._groups[place]

    def wait(self, known: int, timeout_s: float | None = None) -> None:
        """Returns once more than `known` groups have ended, all have, or the time is over. Raises the thread's
        error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._groups) > known, timeout_s)
            if self._error is not None:
                raise self._error

    def wait_for_all(self) -> None:
        """Returns once all groups have ended. Raises the thread's error."""
        self.wait(len(self._places))

    def stop(self) -> None:
        """Ends the batch, if it is not over. Its groups are lost."""
        while not self.is_over:
            self._cancel(self.batch.batch_id)
            self._thread.join(CANCEL_S)

    def _run(self) -> None:
        error = None
        try:
            for group in self._roll_out(self.batch):
                check_answered(group)
                self._on_group(group)
                with self._changed:
                    self.ended_at[self._places[group.prompt_id]] = self._updates()
                    self._groups[self._places[group.prompt_id]] = group
                    self._changed.notify_all()
        except BaseException as raised:  # noqa: BLE001 - the edge of the thread: raised again in the trainer's
            error = raised
        with self._changed:
            self._error, self._over = error, True
            self._changed.notify_all()
