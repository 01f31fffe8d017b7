"""Errors that cross the wire between engines and the coordinator."""


class EngineDown(RuntimeError):
    """The engine was stopped, or one of its steps failed. Its chunks must be resumed elsewhere."""
