"""Errors of calls between the coordinator and its engines, and their one-line form."""


class EngineDown(RuntimeError):
    """The engine was stopped, or one of its steps failed. Its chunks must be resumed elsewhere."""


class ReplicaLost(ConnectionError):
    """The replica is gone. Its chunks must run again."""


class ChunkError(RuntimeError):
    """The replica refused or failed this chunk; the replica lives."""


def one_line(error: BaseException) -> str:
    """The last line of an error's text, with its kind: fit for a reason field."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
