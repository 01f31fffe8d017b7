"""An extension of vLLM's workers that times forward passes and the time between two, on the device.

Invariant: nothing waits while it runs: events are recorded on the stream and read at the end. It knows vLLM 0.32's
two model runners. Called by name over `collective_rpc`, so it works in a process of vLLM's own too.
"""

import itertools
import time
from statistics import median

import torch


class CpuEvent:
    """Stands for an event of CUDA where the work is done when a call returns."""

    def __init__(self):
        self._at_s = 0.0

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, later: "CpuEvent") -> float:
        """Milliseconds, as CUDA's."""
        return 1e3 * (later._at_s - self._at_s)


class PassClock:
    """Methods that vLLM adds to its worker's class. A pass: begin and end of the model, end of the drawing."""

    def watch_passes(self) -> bool:
        """Times passes from now on."""
        if not hasattr(self, "_passes"):
            self._time_runner(self.model_runner)
        self._passes = []
        return True

    def pass_times(self) -> dict[str, float]:
        """Returns medians in ms since `watch_passes`: of the passes, of what is drawn after one, and of the time from
        there to the next pass, in which the device waits for the host or prepares inputs."""
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
        else:  # the second one calls these around every kind of pass
            _around(runner.kv_connector, "pre_forward", self._mark_begin, None)
            _around(runner.kv_connector, "finish_forward", None, self._mark_next)
        _around(runner, "sample_tokens", None, self._mark_next)

    def _mark_begin(self) -> None:
        self._passes.append([self._mark()])

    def _mark_next(self) -> None:
        """Marks the end of the model, then of the drawing; a drawing without a pass has none."""
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
