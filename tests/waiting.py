"""Waiting for other processes in tests: until something is true, and whether a process lives. For both tiers."""

import time
from pathlib import Path

WAIT_S = 300.0
"""What takes longer hangs: an actor of Ray's that starts again takes a minute where two services share two cores."""


def until(look, wait_s: float = WAIT_S):
    """The first answer of `look` that is true; fails after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while not (answer := look()):
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)
    return answer


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
