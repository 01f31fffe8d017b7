"""A file of JSON lines to which one process appends, so that interrupted work can be continued.

Invariant: a line is whole or it is cut off; one process writes at a time; a file of other lines is never opened for
writing, and none of its bytes is lost.
"""

import fcntl
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from tailrace.app.errors import BadInput
from tailrace.app.files.output_file import kind_problem
from tailrace.app.strict_json import parse_object

VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+')
"""First value of a line: a text or an integer."""

Keys = tuple[str, str]


class LinesFile:
    """Open for appending. `line`: a noun for one of them; `keys`: the first two keys of each kind of line.

    Raises BadInput when it cannot be written, is in use, or holds other lines.
    """

    def __init__(self, path: Path, line: str, *keys: Keys):
        self.path, self._line, self._keys, self._bytes = path, line, keys, 0
        try:
            self._check()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"{path}: another run writes it now; wait for its end or give another --out") from error
        except OSError as error:
            raise BadInput(f"{path}: cannot be written: {error.strerror}; give another --out") from error

    def read(self, take: Callable[[dict], None]) -> None:
        """Calls `take` with each line. Cuts off a half-written last line of ours. Raises BadInput, naming the line."""
        self._bytes, number, rest = 0, 0, b""
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    rest = line
                    break
                self._take(take, number, line)
                self._bytes += len(line)
        if rest and self._is_whole(rest):
            self._take(take, number, rest)
            self._write(b"\n")
            self._bytes += len(rest) + 1
        elif rest and not self._is_ours(rest, self._bytes == 0):
            raise self._other(number)
        self._cut()

    def append(self, line: dict) -> None:
        """Appends a line. Raises OSError, and keeps all earlier lines, if the disk is full."""
        data = json.dumps(line).encode() + b"\n"
        try:
            self._write(data)
        except OSError:
            self._cut()
            raise
        self._bytes += len(data)

    def close(self) -> None:
        self._file.close()

    def _check(self) -> None:
        """Raises BadInput if the file holds something else, which is only read. Raises OSError."""
        if not self.path.exists():
            return
        mode = self.path.stat().st_mode
        problem = kind_problem(mode) or (None if stat.S_ISREG(mode) else "is no file that can be read again")
        if problem is not None:
            raise BadInput(f"{self.path}: {problem}; give another --out")
        with self.path.open("rb") as file:
            first = file.readline(1 << 20)
        if first and not self._is_ours(first, True):
            raise self._other(1)

    def _is_ours(self, line: bytes, first: bool) -> bool:
        """Returns whether a line, or the start of one, is ours. The first line must show its first two keys."""
        return any(_begins(line, keys, first) for keys in self._keys)

    def _is_whole(self, line: bytes) -> bool:
        try:
            return bool(parse_object(line, constants=True))
        except ValueError:
            return False

    def _take(self, take: Callable[[dict], None], number: int, line: bytes) -> None:
        try:
            take(parse_object(line, constants=True))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise self._other(number) from error

    def _other(self, number: int) -> BadInput:
        return BadInput(f"{self.path} line {number}: not {self._line}; the file is left as it is, give another --out")

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def _cut(self) -> None:
        """Truncates the file after its last whole line."""
        if os.fstat(self._file.fileno()).st_size > self._bytes:
            self._file.truncate(self._bytes)


def _begins(line: bytes, keys: Keys, shown: bool) -> bool:
    """Returns whether a line begins with these keys, or may if it is cut off before both are `shown`."""
    head, second = (f'{mark}"{key}": '.encode() for mark, key in zip(("{", ", "), keys, strict=True))
    if not line.startswith(head):
        return not shown and head.startswith(line)
    value = VALUE.match(line, len(head))
    if value is None:
        return not shown and line[len(head) :][:1] in (b"", b'"')
    rest = line[value.end() :]
    return rest.startswith(second) or (not shown and second.startswith(rest))
