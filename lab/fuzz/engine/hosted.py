"""The parent's side of an engine process: it requests rounds, and tells a hang and a death from slow work."""

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tailrace.app.errors import Failed
from tailrace.lab.fuzz.engine.fair_clock import Since
from tailrace.lab.fuzz.engine.host import serve
from tailrace.lab.fuzz.engine.problems import FATAL, LATE, LOST, TRACE

START_S, SILENT_S, WALL_S, STACK_S = 300.0, 15.0, 120.0, 30.0
"""Seconds for a start; processor seconds without a message; seconds without a message of a process that does not
compute; seconds for the stacks of a process that hangs."""

TRACEBACK, STACK = "Traceback (", "call first)"
"""Beginnings of Python's own tracebacks, and of those that a signal prints."""

MAX_LINES = 20
"""Maximum number of lines printed in one round: more is a flood. vLLM's own start prints some, before the first
round."""


class HostedEngine:
    """An engine in a process of its own, which starts with the first round, and again after an engine was lost.

    `setup`: arguments of `serve` after the log. `serve`: the function that the process runs. `silent_s`: see SILENT_S.
    """

    def __init__(self, *setup: Any, serve: Callable = serve, silent_s: float = SILENT_S):
        self._setup, self._serve, self._silent_s = setup, serve, silent_s
        self._process, self._connection, self._read = None, None, 0
        self._folder = tempfile.TemporaryDirectory(prefix="tailrace-fuzz-")
        self.starts, self.rounds, self.rounds_of_this = 0, 0, 0
        self._in_round = False

    def run(self, requests: list[dict]) -> dict:
        """Runs a round. Returns its report; see `Round.run`."""
        if self._process is None:
            self._start()
        self.rounds, self.rounds_of_this = self.rounds + 1, self.rounds_of_this + 1
        with contextlib.suppress(ConnectionError):  # it has ended since the last round, which the read finds
            self._connection.send((self.rounds, requests))
        self._in_round = True
        place, since = "the begin", self._since()
        report: dict[str, Any] = {"fates": [], "problems": [], "noise": 0.0, "steps": 0, "rss_mb": 0.0}
        while True:
            try:
                heard = self._connection.recv() if self._connection.poll(0.5) else None
            except (EOFError, ConnectionResetError):
                self._process.join(10)
                report["problems"] = [(LOST, f"the process ended with {self._process.exitcode} at {place}", None)]
                break
            if heard is None:
                if since.fair_s > self._silent_s or since.wall_s > WALL_S:
                    stacks = self._stacks()
                    report["problems"] = [(LATE, f"no word at {place} for {since.fair_s:.0f} s; {stacks}", None)]
                    break
                continue
            if heard[0] == "done":
                report = heard[1]
                break
            place, since = f"{heard[0]} {heard[1]}", self._since()
        self._in_round = False
        if (noisy := self._noise()) is not None:
            report["problems"].append((TRACE, noisy, None))
        if any(kind in FATAL for kind, *_ in report["problems"]):
            self.stop(kill=True)
        return report

    def stop(self, kill: bool = False) -> None:
        """Ends the process; `run` may start it again."""
        if self._process is None:
            return
        if not kill and self._process.is_alive():
            self._connection.send(None)
            self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        self._process = None

    def close(self) -> None:
        """Ends the process for good, and removes its output."""
        self.stop(kill=self._in_round)
        self._folder.cleanup()

    def _since(self) -> Since:
        return Since(self._process.pid)

    def _start(self) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.starts, self.rounds_of_this = self.starts + 1, 0
        self._log, self._read = Path(self._folder.name) / f"engine-{self.starts}.log", 0
        arguments = (theirs, str(self._log), *self._setup)
        self._process = context.Process(target=self._serve, args=arguments, daemon=True, name="fuzzed-engine")
        self._process.start()
        theirs.close()
        try:
            ready = self._connection.poll(START_S) and self._connection.recv()
        except EOFError:
            ready = None
        self._text()
        if not ready:
            last = self._log.read_text(errors="replace").splitlines()[-1:] if self._log.exists() else []
            self.stop(kill=True)
            raise Failed(f"the engine did not start: {''.join(last) or 'it printed nothing'}")

    def _text(self) -> str:
        """Returns the output of the process since the last call."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        new, self._read = text[self._read :], len(text)
        return new

    def _noise(self) -> str | None:
        text = self._text()
        lines = text.splitlines()
        if TRACEBACK in text:
            return f"a traceback: {lines[-1][:300]}"
        return f"{len(lines)} lines: {lines[0][:300]}" if len(lines) > MAX_LINES else None

    def _stacks(self) -> str:
        """Returns the innermost places of the process's threads, those of the product and of vLLM first."""
        os.kill(self._process.pid, signal.SIGUSR1)
        since = Since()
        while STACK not in (text := self._text()) and since.wall_s < STACK_S:
            time.sleep(0.05)
        found = re.findall(r'File "([^"]+)", line (\d+) in (\w+)', text)
        places = [f"{Path(file).name}:{line} {name}" for file, line, name in found if "threading" not in file]
        return "stack: " + " < ".join(places[:6])
