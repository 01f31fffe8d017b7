"""A drafter and an engine that verifies, each in a separate process, for `bench decoupled`.

The functions below the dividing comment are called in those processes, by `submit`. Invariant: both processes end with
this one.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.command import ResetCache
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

HOST = "127.0.0.1"


@contextmanager
def process(start: Callable, *arguments) -> Iterator[ProcessPoolExecutor]:
    process = ProcessPoolExecutor(1, get_context("spawn"), initializer=start, initargs=arguments)
    try:
        process.submit(os.getpid).result()
        yield process
    finally:
        process.shutdown(cancel_futures=True)


# ---- in the process of an engine -----------------------------------------------------------------------

_here: Any = None
"""DrafterServer or EngineRunner of this process."""


def _set_up() -> None:
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs to stdout, which belongs to the result


def draft(config: EngineConfig) -> None:
    global _here  # noqa: PLW0603 - a worker process has no other place for what its calls share
    _set_up()
    from tailrace.deployments.drafter.server import DrafterServer

    _here = DrafterServer(config, HOST, -1)


def verify(config: EngineConfig, drafter: DrafterConfig, address) -> None:
    global _here  # noqa: PLW0603 - as above
    _set_up()
    from tailrace.deployments.drafter.client import Drafters
    from tailrace.deployments.engine.runner import EngineRunner

    drafters = Drafters(drafter)
    drafters.meet([address])
    _here = EngineRunner(config, "verifier", model=drafters)


def address():
    return _here.address


def counts(after_s: float = 0.0) -> dict[str, int]:
    time.sleep(after_s)
    return {key: value for key, value in _here.stats().items() if isinstance(value, int)}


def drafter_cost():
    return _here.stats()["step_cost"]


def verifier_cost():
    found = _here.stats().performance
    return None if found is None else (found.step_tokens, found.step_seconds)


def roll(wanted: list[ChunkRequest]) -> dict:
    """Runs all chunks at once, from an empty cache. Returns figures of the results.

    Raises the error of a failed chunk.
    """
    _here.ask(ResetCache()).result()
    answers: list[Future] = [Future() for _ in wanted]
    for chunk, answer in zip(wanted, answers, strict=True):
        _here.submit(chunk, answer.set_result)
    results = [answer.result() for answer in answers]
    for result in results:
        if isinstance(result, Exception):
            raise result
    tokens = sum(len(result.token_ids) for result in results)
    steps = sum(result.verifications for result in results)
    return {
        "tokens": tokens,
        "tokens_s": round(tokens / sum(result.decode_s for result in results), 2),  # per sample
        "tokens_per_verification": round(tokens / steps, 3),
        "drafted": sum(result.drafted_tokens for result in results),
        "accepted": sum(result.accepted_tokens for result in results),
        "digest": blake2b(b"".join(result.token_ids.tobytes() for result in results)).hexdigest(),
    }
