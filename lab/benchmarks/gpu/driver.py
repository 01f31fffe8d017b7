"""The order in which steps run, each in a process of its own, and their ends.

Invariant: a step that fails, hangs or has no time left costs only itself. One that is out of time is killed with all
that it started. Its measurements are its own to write; the driver writes how it ended. No torch here.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from tailrace.lab.benchmarks.gpu.result_lines import ResultLines

DONE, FAILED, KILLED, NO_TIME = "done", "failed", "out of time", "no time left"
ENDS_WELL = (DONE, NO_TIME)


class CheckStep(NamedTuple):
    """`expected_s`: on the device, a guess until it was timed; a step with less time left does not begin.

    `limit_s`: then it is killed. `run`: module and function. `call`: of two on a machine that is lent for minutes, the
    one that it belongs to; 3: neither. `settings`: arguments of `run`. `second_try`: variables of the environment
    with which it is tried once more when it fails; none: it is not. `dry`: whether it runs on CPUs too.
    """

    name: str
    expected_s: float
    limit_s: float
    call: int
    run: str
    shows: str
    settings: dict = {}  # noqa: RUF012 - never written
    second_try: dict[str, str] = {}  # noqa: RUF012 - never written
    dry: bool = False


class StepEnded(NamedTuple):
    """`reason`: of an end that is not DONE, in words."""

    how: str
    reason: str = ""


Run = Callable[[CheckStep, dict[str, str], float], StepEnded]
"""Runs a step with more settings of the environment, for at most so many seconds."""


Say = Callable[[dict], object]
"""Takes the line of a step that has ended."""


def drive(steps: Iterable[CheckStep], run: Run, results: ResultLines, until_s: float, say: Say) -> dict[str, str]:
    """Runs the steps that fit into `until_s` seconds. Returns how each ended; a second try's end replaces the first."""
    began_s, ends = time.monotonic(), {}

    def attempt(step: CheckStep, settings: dict[str, str]) -> bool:
        left_s = until_s - (time.monotonic() - began_s)
        if left_s < step.expected_s:
            reason = f"{max(0.0, left_s):.0f} s left, {step.expected_s:.0f} s expected"
            ends.setdefault(step.name, NO_TIME)
            say(results.add(step.name, end=NO_TIME, reason=reason))
            return True
        start_s = time.monotonic()
        how, reason = run(step, settings, min(step.limit_s, left_s))
        ends[step.name] = how
        reason = ", ".join(filter(None, [reason, *(f"{name}={value}" for name, value in settings.items())]))
        say(results.add(step.name, end=how, s=round(time.monotonic() - start_s, 1), reason=reason))
        return how == DONE

    for step in steps:
        if not attempt(step, {}) and step.second_try:
            attempt(step, step.second_try)
    return ends


class Processes:
    """Runs each step as a process; all that they write goes to a log file.

    `command`: of a step. `environment`: of a step.
    """

    def __init__(
        self, command: Callable[[CheckStep], list[str]], environment: Callable[[CheckStep], dict[str, str]], log
    ):
        self._command, self._environment, self._log = command, environment, log

    def __call__(self, step: CheckStep, settings: dict[str, str], limit_s: float) -> StepEnded:
        self._log.write(f"\n===== {step.name} {settings or ''}\n".encode())
        self._log.flush()
        process = self.start(step, settings)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return StepEnded(KILLED, f"limit of {limit_s:.0f} s")
        finally:
            end(process)
        return StepEnded(DONE) if code == 0 else StepEnded(FAILED, f"exit code {code}")

    def start(self, step: CheckStep, settings: dict[str, str]) -> subprocess.Popen:
        """Starts a step without waiting for it; `end` ends it."""
        environment = self._environment(step) | settings
        both = {"stdout": self._log, "stderr": self._log}
        return subprocess.Popen(self._command(step), env=environment, start_new_session=True, **both)


def end(process: subprocess.Popen) -> None:
    """Kills a step's process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group outlives its leader while anything of it runs
    process.wait()
