"""Which steps of an engine run ahead (see async_scheduling.py), and the seconds and counts of each.

A step waits if a chunk has a draft, while drafts pay, and during the search after a step that raised. Drafts continue
the last token, so a step that runs ahead of it cannot verify them; the proposals of vLLM's own drafter it can, since
they are on the device. How many of these are right is known there alone, so no step runs ahead of them with a chunk
whose tokens the host draws. Invariant: seconds are those between the tokens of two steps, without the commands that the
engine obeys in between. They hold the host's work where it was not hidden behind the device's, so the measured cost of
steps decides whether drafts are worth waiting for. Owned by the stepper.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from tailrace.deployments.engine.engine_chunk import EngineChunk, tokens_to_verify
from tailrace.deployments.engine.step_outputs import StepOutputs
from tailrace.deployments.messages.chunk import STEP_BOUNDS_S
from tailrace.deployments.messages.drafts import ON_DEVICE

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


class StepDone(NamedTuple):
    """A step whose tokens have come: what it computed, its seconds, and when they came, on the clock of the pace.
    `proposed`: whether vLLM's own drafter ran in it; None if the pace does not know.
    """

    work: StepWork
    took_s: float
    ended_s: float
    proposed: bool | None


class StepPace:
    """`now`: a monotonic clock. `scheduled`: returns the tokens and requests of the step that was started last."""

    def __init__(
        self, outputs: StepOutputs, now: Callable[[], float], scheduled: Callable[[], tuple[int, int]] = lambda: (0, 0)
    ):
        self._outputs, self._scheduling, self._scheduled, self._now = outputs, outputs.scheduling, scheduled, now
        self._started: deque[StepWork] = deque()
        self._waiting = 0  # steps that wait whether or not they have drafts
        self._next = StepWork(0, 0, False)  # the step that the present call starts, if it starts one
        self.began_s = self._ended_s = self._spent_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Sets the counts to 0: of steps, of the tokens that came, and of the samples that each of them verified."""
        self.counts = Counter(dict.fromkeys(("steps", "steps_ahead", "step_us", "tokens", "verifications"), 0))
        self.durations = [0] * (len(STEP_BOUNDS_S) + 1)

    @property
    def in_flight(self) -> int:
        """Number of steps whose tokens have not arrived."""
        return 0 if self._scheduling is None else self._scheduling.in_flight

    @property
    def computing(self) -> bool:
        """True if a step in flight computes a token; one that waits for KV computes none."""
        return self._scheduling is not None and self._scheduling.computing

    def begin(self, chunks: Collection[EngineChunk], may_run_ahead: bool) -> bool:
        """Begins a call for the next step of these chunks. Returns whether the step runs ahead."""
        context_tokens = sum([one.request.num_computed_tokens for one in chunks])
        self.began_s, self._next = self._now(), StepWork(tokens_to_verify(chunks), context_tokens, self.in_flight > 0)
        if self._scheduling is None or self._waiting or not may_run_ahead:
            return False
        runs = [one for one in chunks if not one.is_out]
        drafts = [draft for one in runs if (draft := one.request.spec_token_ids)]
        if any([draft[0] != ON_DEVICE for draft in drafts]):
            return False
        return bool(runs) and not (drafts and any([one.drawn_on_host for one in runs]))

    @property
    def drafts_in_flight(self) -> dict[str, list[int]] | None:
        """Returns the drafts of the step in flight, see `AsyncScheduling.drafts`; None without one."""
        return None if self._scheduling is None else self._scheduling.drafts

    def end(self) -> StepDone | None:
        """Ends the call. Returns the step whose tokens it has brought; None if it has only started one."""
        self._ended_s = self._now()
        took_s = self._ended_s - self.began_s
        if self._scheduling is None or self._scheduling.started:
            self._started.append(self._next._replace(scheduled=self._scheduled()))
        if self._scheduling is not None:
            self._spent_s += took_s
            if not self._scheduling.ended:
                return None
            took_s, self._spent_s = self._spent_s, 0.0
        proposed = None if self._scheduling is None else self._scheduling.proposed
        done = StepDone(self._started.popleft(), took_s, self._ended_s, proposed)
        self.counts["steps"] += 1
        self.counts["steps_ahead"] += done.work.ahead
        self.counts["step_us"] += int(took_s * 1e6)
        self.durations[bisect_left(STEP_BOUNDS_S, took_s)] += 1
        return done

    def leave(self, drafts_pay: bool, has_chunks: bool) -> None:
        """Records that the stepper is done with the tokens of a step. `drafts_pay`: of the next step, or would if it
        waited.
        """
        self._spent_s = self._now() - self._ended_s if has_chunks else 0.0
        self._waiting = WAITING_STEPS if drafts_pay else max(0, self._waiting - 1)

    def finish(self) -> None:
        """Ends the steps in flight, which compute nothing that is still wanted. Commands may follow."""
        while self.in_flight:
            self._outputs.step(self.begin((), False))
            self.end()

    def abandon(self) -> None:
        """Drops the steps in flight, after an error."""
        if self._scheduling is not None:
            self._scheduling.abandon()
        self._outputs.drop_answers()
        self._started.clear()
        self._spent_s = 0.0
