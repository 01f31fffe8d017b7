"""One driver in a separate process, started again with the same batch whenever it ends, until it is to finish.

Invariant: the process has ended once `run` has returned or was cancelled. Called by lab/soak/run.py.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from tailrace.lab.soak.scripts import DriverScript

MAX_LINE_BYTES = 1 << 26
"""Maximum length of a line: a group of results in JSON."""

FINISH_S = 300.0
"""Longest wait in seconds for the batch in flight at the end: a frozen engine costs a minute, and a start of
another.
"""

AGAIN_S = 1.0

MODULE = ("-m", "tailrace.lab.soak.driver")


class DriverProcess:
    """`hear`: called with each event of the driver, see lab/soak/driver.py, and with an error if its process dies
    without one. `folder`: for its script and its stderr.
    """

    def __init__(self, script: DriverScript, address: str, folder: Path, hear: Callable[[str, dict], None]):
        self.script, self._address, self._hear = script, address, hear
        self._file = folder / f"{script.name}.json"
        self._file.write_text(script.model_dump_json())
        self._number = 0
        self._process: asyncio.subprocess.Process | None = None
        self._finishing, self._in_batch = False, False
        self._is_explained = False  # the present process was killed here, or has told its error

    async def run(self) -> None:
        """Runs the driver until `finish`, and then until the batch in flight has ended."""
        try:
            while self._in_batch or not self._finishing:
                self._is_explained = False
                with self._file.with_suffix(".stderr").open("ab") as errors:
                    self._process = await self._start(errors)
                async for line in self._process.stdout:
                    self._take(line)
                status = await self._process.wait()
                if status and not (self._is_explained or self._finishing):
                    self._hear(self.script.name, {"event": "error", "text": self._end(status)})
                await asyncio.sleep(AGAIN_S)
        finally:
            self.kill()
            if self._process is not None:
                await self._process.wait()

    async def _start(self, errors) -> asyncio.subprocess.Process:
        """Starts the process in a new session, so that Ctrl-C reaches the soak alone."""
        arguments = (str(self._file), self._address, str(self._number), "once" if self._finishing else "on")
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *MODULE,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )

    def _end(self, status: int) -> str:
        """Returns how the process has ended, with the last line of its stderr."""
        last = self._file.with_suffix(".stderr").read_text(errors="replace").splitlines()[-1:]
        return ": ".join([f"its process ended with status {status}", *(line[:300] for line in last)])

    def _take(self, line: bytes) -> None:
        """Takes a line of the driver. The last one of a killed driver may be torn."""
        if not (line.startswith(b"{") and line.endswith(b"\n")):
            return
        event = json.loads(line)
        self._hear(self.script.name, event)
        match event["event"]:
            case "began":
                self._in_batch = True
            case "ended":
                self._number, self._in_batch = event["batch"] + 1, False
            case "error":
                self._is_explained = True

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def kill(self) -> bool:
        """Kills the process. Returns whether it ran."""
        if self.pid is None:
            return False
        self._is_explained = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return True

    def finish(self) -> None:
        """Asks it to end after the batch in flight. One that is still connecting ends at once."""
        self._finishing = True
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
