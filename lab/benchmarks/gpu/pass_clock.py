"""An extension of vLLM's workers that times forward passes, and the time between two passes, on the device.

Invariant: timing waits for nothing while steps run. Events are recorded on the stream and read at the end. The code
knows vLLM 0.32's two model runners. Methods are called by name over `collective_rpc`, so they work in a process of
vLLM's own too.
"""

import itertools
import time
from statistics import median

import torch


class CpuEvent:
    """A substitute for a CUDA event on CPUs, where the work is done when a call returns."""

    def __init__(self):
        self._at_s = 0.0

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, later: "CpuEvent") -> float:
        """Returns the milliseconds from this event to `later`, as CUDA's events do."""
        return 1e3 * (later._at_s - self._at_s)


class PassClock:
    """Methods that vLLM adds to its worker's class. A pass has three events: begin of the model, end of the model, end
    of the draw. Both runners compute the logits after the model, so this product is part of the draw.
    """

    def watch_passes(self) -> bool:
        """Drops the times so far and begins to time passes. Returns True."""
        if not hasattr(self, "_passes"):
            self._time_runner(self.model_runner)
        self._passes = []
        return True

    def pass_times(self) -> dict[str, float]:
        """Returns medians in ms since `watch_passes`: of a pass, of the logits and the draw after it, and of the time
        from there to the next pass, in which the device waits for the host or prepares inputs. Returns an empty dict
        after fewer than two whole passes.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        whole = [events for events in self._passes if len(events) == 3]
        if len(whole) < 2:
            return {}
        nexts = itertools.pairwise(whole)
        return {
            "pass_ms": round(median(begin.elapsed_time(end) for begin, end, _ in whole), 4),
            "drawing_ms": round(median(end.elapsed_time(drawn) for _, end, drawn in whole), 4),
            "between_ms": round(median(one[2].elapsed_time(other[0]) for one, other in nexts), 4),
        }

    def _time_runner(self, runner) -> None:
        if hasattr(runner, "_model_forward"):  # the first runner
            _around(runner, "_model_forward", self._mark_begin, self._mark_next)
        else:  # the second runner calls these two around every kind of pass
            _around(runner.kv_connector, "pre_forward", self._mark_begin, None)
            _around(runner.kv_connector, "finish_forward", None, self._mark_next)
        _around(runner, "sample_tokens", None, self._mark_next)

    def _mark_begin(self) -> None:
        self._passes.append([self._mark()])

    def _mark_next(self) -> None:
        """Marks the end of the model, then the end of the draw. A draw without a pass is not marked."""
        if self._passes and len(self._passes[-1]) < 3:
            self._passes[-1].append(self._mark())

    @staticmethod
    def _mark():
        event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else CpuEvent()
        event.record()
        return event


def _around(owner, name: str, before, after) -> None:
    inner = getattr(owner, name)

    def timed(*args, **kwargs):
        if before is not None:
            before()
        try:
            return inner(*args, **kwargs)
        finally:
            if after is not None:
                after()

    setattr(owner, name, timed)
