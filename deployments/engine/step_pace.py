"""Which steps of an engine run ahead (see async_scheduling.py), and the seconds of each step.

A step waits if a chunk has a draft, while drafts pay, and during the search after a step that raised. Drafts continue
the last token, so a step that runs ahead of it cannot verify them. Invariant: seconds are those between the tokens of
two steps, without the commands that the engine obeys in between. They hold the host's work where it was not hidden
behind the device's, so the measured cost of steps decides whether drafts are worth waiting for. Owned by the stepper.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from tailrace.deployments.engine.engine_chunk import EngineChunk
from tailrace.deployments.vllm_exact.async_scheduling import AsyncScheduling

WAITING_STEPS = 2
"""Number of steps that wait after drafts paid: the one that verifies them, and one more. A return to steps ahead costs
nothing, and the next switch from them one step without overlap, as much as this one.
"""


class StepWork(NamedTuple):
    """What a step computes: tokens to verify, see `tokens_to_verify`; tokens of context of all its chunks; whether it
    was scheduled ahead; tokens and requests scheduled, which only an engine with a pool knows.
    """

    verified_tokens: int
    context_tokens: int
    ahead: bool
    scheduled: tuple[int, int] = (0, 0)


class StepPace:
    """`scheduling`: None if all steps of the engine wait."""

    def __init__(self, scheduling: AsyncScheduling | None):
        self._scheduling = scheduling
        self._started: deque[StepWork] = deque()
        self._waiting = 0  # steps that wait whether or not they have drafts
        self._began_s = self._ended_s = self._spent_s = 0.0

    @property
    def in_flight(self) -> int:
        """Number of steps whose tokens have not arrived."""
        return 0 if self._scheduling is None else self._scheduling.in_flight

    @property
    def computing(self) -> bool:
        """True if a step in flight computes a token; one that waits for KV computes none."""
        return self._scheduling is not None and self._scheduling.computing

    def begin(self, chunks: Iterable[EngineChunk], may_run_ahead: bool, now_s: float) -> bool:
        """Returns whether the next step of these chunks runs ahead."""
        self._began_s = now_s
        if self._scheduling is None or self._waiting or not may_run_ahead:
            return False
        requests = [one.request for one in chunks if not one.is_out]
        return bool(requests) and not any([request.spec_token_ids for request in requests])

    def end(self, work: StepWork, now_s: float) -> tuple[StepWork, float] | None:
        """Records that the call of the step has returned. `work`: of the step that it has started, if it has.

        Returns the work and the seconds of the step whose tokens it has brought; None if it has brought none.
        """
        self._ended_s, took_s = now_s, now_s - self._began_s
        if self._scheduling is None:
            return work, took_s
        if self._scheduling.started:
            self._started.append(work)
        self._spent_s += took_s
        if not self._scheduling.ended:
            return None
        took_s, self._spent_s = self._spent_s, 0.0
        return self._started.popleft(), took_s

    def leave(self, now_s: float, drafts_pay: bool, has_chunks: bool) -> None:
        """Records that the stepper is done with the tokens of a step. `drafts_pay`: of the next step, or would if it
        waited.
        """
        self._spent_s = now_s - self._ended_s if has_chunks else 0.0
        self._waiting = WAITING_STEPS if drafts_pay else max(0, self._waiting - 1)

    def abandon(self) -> None:
        """Drops the steps in flight, after an error."""
        if self._scheduling is not None:
            self._scheduling.abandon()
        self._started.clear()
        self._spent_s = 0.0
