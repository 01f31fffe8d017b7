"""A child process is started again when it ends, stopped for good when asked, and dies with its parent."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from waiting import is_alive, until

from tailrace.kvpool import child_process
from tailrace.kvpool.child_process import FIRST_PAUSE_S, KEPT_LINES, LONGEST_PAUSE_S, SETTLED_S, ChildProcess

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


@contextmanager
def shell(script: str):
    child = ChildProcess("child", lambda: (["/bin/sh", "-c", script], ENVIRONMENT))
    try:
        yield child
    finally:
        child.stop()


def test_it_is_started_again_when_it_ends():
    with shell("exec sleep 600") as child:
        first = until(lambda: child.pid)
        os.kill(first, signal.SIGKILL)
        second = until(lambda: child.pid if child.pid != first else None)
        assert child.restarts == 1
        child.kill()
        until(lambda: child.pid not in (None, second))
        assert child.restarts == 2
    assert child.pid is None and not is_alive(second)


def test_it_is_stopped_though_it_ignores_the_request(monkeypatch):
    monkeypatch.setattr("tailrace.kvpool.child_process.TERM_S", 0.3)
    with shell("trap '' TERM; echo ready; while true; do sleep 0.1; done") as child:
        until(lambda: child.last_line() == "ready")
        pid = child.pid
    assert child.pid is None and not is_alive(pid)


def test_it_may_say_more_than_a_pipe_holds():
    with shell("seq 1 50000; echo 'E0101 it is broken'; seq 1 3; exec sleep 600") as child:
        until(lambda: child.last_line() == "E0101 it is broken")
        until(lambda: child._lines[-1] == "3")
        assert len(child._lines) == KEPT_LINES


def test_a_program_that_is_missing_is_tried_again():
    attempts = []

    def launch():
        attempts.append(1)
        raise FileNotFoundError("no such program")

    child = ChildProcess("child", launch)
    until(lambda: len(attempts) > 1)
    assert child.last_line() == "child: no such program" and child.pid is None
    child.stop()


class Waits:
    """An event whose waits are noted, and which is set after `count` of them."""

    def __init__(self, count: int):
        self.pauses, self._left = [], count

    def is_set(self) -> bool:
        return len(self.pauses) >= self._left

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return self.is_set()

    def set(self) -> None:
        self._left = 0


def test_pauses_before_a_start_double_up_to_the_longest_and_begin_anew_after_a_long_run(monkeypatch):
    waits, now_s = Waits(9), [0.0]
    monkeypatch.setattr(child_process, "Event", lambda: waits)
    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def launch():
        if len(waits.pauses) == 7:
            now_s[0] += SETTLED_S + 1.0
        raise FileNotFoundError("no such program")

    child = ChildProcess("child", launch)
    child._thread.join()
    assert waits.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S, FIRST_PAUSE_S, 0.5]
    assert child.restarts == 8, "the last wait was the end"


def test_it_dies_with_its_parent():
    code = (
        "import sys, time; from tailrace.kvpool.child_process import ChildProcess\n"
        f"child = ChildProcess('child', lambda: (['/bin/sleep', '600'], {ENVIRONMENT}))\n"
        "while child.pid is None: time.sleep(0.01)\n"
        "time.sleep(0.2); print(child.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    until(lambda: not is_alive(pid))
