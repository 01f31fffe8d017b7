"""Errors of calls between processes, kept apart from the code that raises them, so that no room imports another for an
exception.

Imported by the engine (which raises EngineDown), by the coordinator's client of the engines, and by its callers.
"""

import asyncio


class EngineDown(RuntimeError):
    """The engine has stopped or a step of it has failed; its chunks must run again on another replica."""


class ReplicaLost(ConnectionError):
    """The replica is gone; its chunks must run again on another one."""


class ChunkNotTaken(ReplicaLost):
    """The replica was gone before it took the chunk, which therefore cannot be the cause."""


class ChunkError(RuntimeError):
    """The replica refused or failed this chunk; the replica itself is alive."""


class SampleRefused(ChunkError):
    """No replica can run the sample of this chunk, so neither this one nor chance is to blame."""


REFUSED = "no engine can run it: "
"""Prefix of the error of a sample whose request is to blame, not the service; the engine's reason follows."""


class RequestRefused(ValueError):
    """No engine can ever run this chunk's request; one line that names the field. The sample ends, without a retry."""


class AdapterRefused(RequestRefused):
    """An adapter cannot be loaded, or its folder now holds another content."""


class FeaturesRefused(RequestRefused):
    """The model cannot take the features of a prompt."""


def is_own_cancel() -> bool:
    """Returns whether a CancelledError is meant for this task; Serve also raises it for a callee that was cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def one_line(error: BaseException) -> str:
    """Returns the kind and the last line of an error, short enough for a reason field."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
