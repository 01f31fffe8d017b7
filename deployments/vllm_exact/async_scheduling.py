"""vLLM's asynchronous scheduling, switched on or off before each step.

A step that runs ahead is scheduled and started before the tokens of the step before have arrived, so the host's work
hides behind the device's. vLLM's scheduler counts a place for each token to come; its second model runner keeps the
tokens on the device, and the proposals of vLLM's own drafter. A step that waits is scheduled from all tokens: drafts of
the host need it, since they continue the last one.
Invariant: outputs come step by step, in order; whoever waits finds no step in flight. Called on the engine's thread.
"""

from collections import deque
from contextlib import suppress
from typing import NamedTuple

DEPTH = 2
"""Maximum number of steps in flight: the one that the device computes, and the next."""


class StepInFlight(NamedTuple):
    """A step that the model runner has been given. The futures are those of vLLM's executor."""

    tokens: object
    scheduled: object  # vLLM's SchedulerOutput
    forward: object


class AsyncScheduling:
    """Replaces `EngineCore.step_fn` (vLLM 0.32) of an engine with an asynchronous scheduler. `core`: its EngineCore."""

    def __init__(self, core):
        self._core, self._ahead = core, False
        self._in_flight: deque[StepInFlight] = deque()
        self.started = self.ended = False  # what the last call did
        self.proposed = False  # whether vLLM's drafter ran in the step that ended last
        core.step_fn = self._step

    @property
    def in_flight(self) -> int:
        """Number of steps whose tokens have not arrived."""
        return len(self._in_flight)

    @property
    def computing(self) -> bool:
        """True if a step in flight computes a token."""
        return any(step.scheduled.total_num_scheduled_tokens for step in self._in_flight)

    @property
    def drafts(self) -> dict[str, list[int]] | None:
        """Drafts that the step in flight verifies, by vLLM's request, -1 for tokens that the device has; None without
        one.
        """
        return self._in_flight[-1].scheduled.scheduled_spec_decode_tokens if self._in_flight else None

    def set(self, ahead: bool) -> None:
        """Sets how the next call works. `ahead`: it starts a step, and returns the tokens of the one before, if there
        is one. Otherwise it ends the oldest step in flight; without one it runs a step from start to end.
        """
        self._ahead = ahead

    def abandon(self) -> None:
        """Waits for the steps in flight, and drops their tokens and errors; what they report about the pool's
        transfers is taken. With a pool vLLM frees the blocks of an ended request once the steps after it have ended; a
        step that raised would never count as ended.
        """
        scheduler = self._core.scheduler
        while self._in_flight:
            with suppress(Exception):  # the step before has raised already, and says why
                found = self._in_flight.popleft().tokens.result()
                if found.kv_connector_output is not None:
                    scheduler._update_from_kv_xfer_finished(found.kv_connector_output)
        scheduler.processed_step_seq = scheduler.sched_step_seq
        scheduler._drain_deferred_frees()

    def _step(self) -> tuple[dict, bool]:
        """Returns what `EngineCore.step` returns: outputs by client, and whether the model has run."""
        self.started = self.ended = False
        if (self._ahead or not self._in_flight) and self._core.scheduler.has_requests():
            self._start()
        if not self._in_flight or (self._ahead and self.started and len(self._in_flight) < DEPTH):
            return {}, self.started
        return self._end(), self.started

    def _start(self) -> None:
        executor, scheduled = self._core.model_executor, self._core.scheduler.schedule()
        with self._core.log_error_detail(scheduled):
            forward = tokens = executor.execute_model(scheduled, non_block=True)
            if scheduled.total_num_scheduled_tokens:
                tokens = executor.sample_tokens(None, non_block=True)  # no grammar of vLLM's: the rules are ours
        self._in_flight.append(StepInFlight(tokens, scheduled, forward))
        self.started = True

    def _end(self) -> dict:
        step = self._in_flight.popleft()
        with self._core.log_error_detail(step.scheduled):
            found = step.tokens.result()
            if found is None:
                step.forward.result()  # raises the error of the forward pass
                raise RuntimeError("vLLM returned no tokens of a step")
        outputs = self._core.scheduler.update_from_output(step.scheduled, found)
        self._core._attach_weight_version(outputs)
        self.ended, self.proposed = True, step.scheduled.num_spec_tokens_to_schedule > 0
        return outputs
