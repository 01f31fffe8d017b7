"""Runs the steps in order, each in a process of its own, and records how each ended.

Invariant: a step that fails, hangs or has no time left does not affect the others. A step that exceeds its limit is
killed with its process group. A step writes its own measurements; the driver writes how the step ended. This module
does not import torch.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from tailrace.lab.benchmarks.gpu.result_lines import ResultLines

DONE, PARTLY, FAILED, KILLED, NO_TIME = "done", "done in part", "failed", "out of time", "no time left"
UNLIKE = "unlike"
"""Ends of a step. PARTLY: some of its measurements failed, and the others have their figures. UNLIKE: by its figures
tokens or bytes that must be the same are not.
"""

ENDS_WELL = (DONE, NO_TIME)
PARTLY_CODE, UNLIKE_CODE = 4, 5
"""Exit codes of the process of a step that ends as PARTLY or UNLIKE."""


class CheckStep(NamedTuple):
    """`expected_s`: seconds on the device, guessed until measured; a step with less time left does not begin.

    `limit_s`: seconds after which the step is killed. `call`: 1 or 2 for a step of the first or second call on a
    machine that is lent for minutes, else 3. `run`: module and function, with a colon between. `shows`: what the step
    shows, for users. `settings`: keyword arguments of `run`. `second_try`: environment variables with which a step that
    failed or was killed is tried once more; without any it is not. `dry`: whether the step runs on CPUs too.
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
    """How a step ended. `reason`: why it failed, was killed or was not run, in words."""

    how: str
    reason: str = ""


Run = Callable[[CheckStep, dict[str, str], float], StepEnded]
"""Function that runs a step with additional environment variables, for at most a number of seconds."""


Say = Callable[[dict], object]
"""Function that gets the result line of a step that has ended."""


def drive(steps: Iterable[CheckStep], run: Run, results: ResultLines, until_s: float, say: Say) -> dict[str, str]:
    """Runs the steps that fit into `until_s` seconds, and records and reports each end. Returns how each step ended, by
    name. The end of a second try replaces the first one's, unless the second try had no time.
    """
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
        return how in (DONE, PARTLY, UNLIKE)

    for step in steps:
        if not attempt(step, {}) and step.second_try:
            attempt(step, step.second_try)
    return ends


class Processes:
    """A Run that starts a process for each step; the output of the processes goes to the open file `log`.

    `command` and `environment`: return a step's command line and its environment variables.
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
        if code == PARTLY_CODE:
            return StepEnded(PARTLY, "some measurements failed")
        if code == UNLIKE_CODE:
            return StepEnded(UNLIKE, "tokens or bytes that must be the same are not")
        return StepEnded(DONE) if code == 0 else StepEnded(FAILED, f"exit code {code}")

    def start(self, step: CheckStep, settings: dict[str, str]) -> subprocess.Popen:
        """Starts a step's process without waiting for it; `end` kills the process."""
        environment = self._environment(step) | settings
        both = {"stdout": self._log, "stderr": self._log}
        return subprocess.Popen(self._command(step), env=environment, start_new_session=True, **both)


def end(process: subprocess.Popen) -> None:
    """Kills the process group of a step, and waits for its first process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a group exists as long as one of its processes runs
    process.wait()
