"""One child process: started, watched, restarted when it ends, stopped. Used by the pool's actors.

Invariant: the child never outlives this process, however that ends: the kernel kills it (PR_SET_PDEATHSIG, set by
util-linux's `setpriv`). The signal comes when the *thread* that forked ends, so one thread forks, reads the child's
output (a full pipe would stop it) and waits for it, as long as this object is in use.
"""

import subprocess
import time
from collections import deque
from collections.abc import Callable
from threading import Event, Thread

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
"""First and longest pause, in seconds, before a restart; doubled each time: a port may be taken for a moment, or for
good.
"""

SETTLED_S = 30.0
"""Seconds after which a child's next restart uses the first pause again."""

KEPT_LINES = 100
TERM_S = 3.0
"""Seconds that a child gets after SIGTERM before SIGKILL."""

Launch = tuple[list[str], dict[str, str]]
"""A command, and the complete environment of the child."""


class ChildProcess:
    """`launch` is called before every start, on the watching thread; an exception from it counts as a failed start."""

    def __init__(self, name: str, launch: Callable[[], Launch]):
        self.name = name
        self.restarts = 0
        self._launch = launch
        self._child: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._stopping = Event()
        self._thread = Thread(target=self._watch, name=f"watch-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id, or None while it is not running."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    def last_line(self) -> str:
        """Last error that the child logged (glog: a line that begins with E or F), else its last line."""
        lines = list(self._lines)
        errors = [line for line in lines if line[:1] in ("E", "F") and line[1:2].isdigit()]
        return (errors or lines or [f"{self.name} has said nothing"])[-1]

    def kill(self) -> None:
        """Kills the child at once; it is restarted."""
        if (child := self._child) is not None:
            child.kill()

    def stop(self) -> None:
        """Ends the child for good; blocks up to TERM_S, and then until it is killed."""
        self._stopping.set()
        if (child := self._child) is not None:
            child.terminate()
        self._thread.join(TERM_S)
        if self._thread.is_alive() and (child := self._child) is not None:
            child.kill()
            self._thread.join()

    def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                self._run_once()
            except (OSError, ImportError) as error:  # the program is missing, or no memory to fork
                self._lines.append(f"{self.name}: {error}")
            if time.monotonic() - began_s > SETTLED_S:
                pause_s = FIRST_PAUSE_S
            if not self._stopping.wait(pause_s):
                self.restarts += 1
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _run_once(self) -> None:
        command, environment = self._launch()
        self._child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if self._stopping.is_set():  # stop() may have run before there was a child
            self._child.terminate()
        for line in self._child.stdout:
            self._lines.append(line.rstrip())
        self._lines.append(f"{self.name} ended with code {self._child.wait()}")
