"""Work in forked processes, a few at a time; each has loaded what this one has, and may spoil it."""

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

LITTLE_S = 0.01


class Fork:
    """One process. `work` gets the file that it writes its answer into."""

    def __init__(self, work: Callable[[Path], None], folder: Path, limit_s: float):
        self.answer = folder / "answer"
        self.started = time.monotonic()
        self.limit_s = limit_s
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(work, folder)

    def _child(self, work, folder: Path) -> None:
        try:
            os.setsid()
            errors = os.open(folder / "errors", os.O_WRONLY | os.O_CREAT)
            for number in (1, 2):
                os.dup2(errors, number)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
            work(self.answer)
        except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)

    def ended(self) -> bool:
        """Whether it has ended; after its limit it and its children are killed."""
        if os.waitpid(self.pid, os.WNOHANG)[0]:
            return True
        if time.monotonic() - self.started > self.limit_s:
            self.kill()
            os.waitpid(self.pid, 0)
            return True
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def text(self) -> str:
        """Its answer, or nothing if it gave none."""
        return self.answer.read_text() if self.answer.exists() else ""


def forked(tasks: Iterable[tuple[Any, Callable[[Path], None], float]], jobs: int) -> Iterator[tuple[Any, str, float]]:
    """Run each task, a key with its work and its limit in seconds. Yields key, answer and seconds as they end."""
    waiting = iter(tasks)
    running: dict[Fork, tuple] = {}
    try:
        while True:
            while len(running) < jobs and (task := next(waiting, None)):
                key, work, limit_s = task
                folder = tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True)
                running[Fork(work, Path(folder.name), limit_s)] = (key, folder)
            if not running:
                return
            for one in [fork for fork in running if fork.ended()]:
                key, folder = running.pop(one)
                text, seconds = one.text(), one.seconds
                one.kill()  # processes that a test left
                folder.cleanup()
                yield key, text, seconds
            time.sleep(LITTLE_S)
    finally:
        for one in running:
            one.kill()
