"""A file of JSON lines to which one process appends, so that work which ends early is taken up again.

Invariant: a line is whole or it is cut off; one process writes at a time.
"""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

from tailrace.app.errors import BadInput
from tailrace.app.strict_json import parse_object


class LinesFile:
    """Open for appending. `line`: a name for one of them. Raises BadInput when it cannot be written or is in use."""

    def __init__(self, path: Path, line: str):
        self.path, self._line, self._bytes = path, line, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"{path}: another run writes it now; wait for its end or give another --out") from error
        except OSError as error:
            raise BadInput(f"{path}: cannot be written: {error.strerror}; give another --out") from error

    def read(self, take: Callable[[dict], None]) -> None:
        """Gives each line to `take`. A half-written last line is cut off. Raises BadInput, naming the line."""
        self._bytes = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    take(parse_object(line, constants=True))
                except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                    raise BadInput(f"{self.path} line {number}: not {self._line}; give another --out") from error
                self._bytes += len(line)
        self._cut()

    def append(self, line: dict) -> None:
        """Raises OSError, and keeps all earlier lines, if the disk is full."""
        data = json.dumps(line).encode() + b"\n"
        try:
            self._write(data)
        except OSError:
            self._cut()
            raise
        self._bytes += len(data)

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def _cut(self) -> None:
        """Ends the file after its last whole line."""
        if os.fstat(self._file.fileno()).st_size > self._bytes:
            self._file.truncate(self._bytes)
