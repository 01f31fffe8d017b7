"""The record of one request's transfers from and to the pool. Written by `PoolScheduler`, read by the engine."""

from concurrent.futures import Future
from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Transfers of one request. `cause`: why the rest of its context had to be computed."""

    version: int
    min_pull_tokens: int | None
    save: bool
    save_prompt: bool
    save_stopped: bool = False  # also after a stop token
    asked_s: float | None = None
    answer: Future | None = None
    hit_tokens: int | None = None
    pulled_tokens: int = 0
    cause: str = "not_pulled"
    saved_tokens: int = 0
    jobs: int = 0
    names: tuple[bytes, ...] = ()
