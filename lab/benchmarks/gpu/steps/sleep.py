"""Measures the memory that an engine gives back while it sleeps, and the seconds until the engine has it again."""

import time
from collections.abc import Callable

import numpy as np

from tailrace.deployments.messages.command import FallAsleep, LoadWeights, WakeKv
from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.steps.engine import made
from tailrace.lab.benchmarks.gpu.steps.ours import started

SHAPE = "1.7B"


def sleep(step: Measurements) -> None:
    settings = {"enable_sleep_mode": True, "gib": 20.0} if step.place.card else {}
    engine = started(step, SHAPE, eager=True, draft="off", **settings)
    step.tried("a turn", lambda: _turn(step, engine))


def _turn(step: Measurements, engine) -> dict:
    """Has the engine fall asleep, load the same weights and wake its KV. Returns free GiB and seconds of each command,
    and whether the tokens before and after are equal.
    """
    prompt, model = np.arange(3, 40, dtype=np.int32), made(step.place, SHAPE)[0]
    free_gib, seconds = [], {}

    def tokens(name: str) -> list[int]:
        chunk = engine.chunk(name, 0, prompt, [], step.place.of(24, 4), "sleep")
        return engine.run([chunk])[name].token_ids.tolist()

    def timed(name: str, run: Callable) -> None:
        began_s = time.perf_counter()
        engine.obeyed(run())
        seconds[name] = round(time.perf_counter() - began_s, 3)
        free_gib.append(_free_gib(step.place.card))

    before = tokens("before")
    free_gib.append(_free_gib(step.place.card))
    timed("fall_asleep", lambda: engine.loop.ask(FallAsleep()))
    timed("load_weights", lambda: engine.loop.ask(LoadWeights(1, model)))
    timed("wake_kv", lambda: engine.loop.ask(WakeKv()))
    engine.version = 1
    return {"free_gib": free_gib, "seconds": seconds, "same_tokens": tokens("after") == before}


def _free_gib(card: bool) -> float | None:
    """Returns the free GiB of the device; None on a CPU."""
    if not card:
        return None
    import torch

    return torch.cuda.mem_get_info()[0] / 2**30
