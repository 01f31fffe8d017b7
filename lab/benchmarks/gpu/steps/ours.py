"""Tests our engine: equal tokens in each way to compute them, and the times of steps."""

from tailrace.deployments.vllm_exact import launch
from tailrace.deployments.vllm_exact.engine_config import ASYNC
from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.place import Place
from tailrace.lab.benchmarks.gpu.steps import decoding, exactness
from tailrace.lab.benchmarks.gpu.steps.engine import (
    KV_GIB,
    CheckedEngine,
    config_of,
    force_invariant,
    made,
    vocabulary_of,
)
from tailrace.policies.protocol.exactness import Exactness


def inputs(place: Place, runner: str, shape: str = "135M", **settings):
    """Returns the arguments and environment variables that vLLM would get on a GPU. `settings`: see `settings_of`."""
    card, given = place._replace(card=True), settings_of(runner, **settings)
    config = config_of(card, f"a folder of {shape}", running=256, **given)
    return launch.engine_arguments(config), launch.process_settings(config, None)


def settings_of(runner: str, level: Exactness = "bits", forced: str | None = None, ahead: bool = True) -> dict:
    """Returns settings of an engine. `forced`: an attention backend that `bits` refuses. `ahead`: whether V2 may run
    steps without drafts ahead.
    """
    more = {} if ahead else {ASYNC: False}
    return {"runner": runner, "level": level} | more | ({} if forced is None else {"attention_backend": forced})


def exact(step: Measurements, runner: str) -> None:
    """Compares the tokens of an eager engine."""
    engine = started(step, "135M", eager=True, runner=runner)
    exactness.SameSamples(step, engine, vocabulary_of(step.place, "135M")).compare()


def times(step: Measurements, runner: str, shape: str = "135M", **settings):
    """Measures tokens, flips, and times of steps, with CUDA graphs. Dummy weights are only timed, because their logits
    are all alike.

    `settings`: see `settings_of`. With `forced`, products are batch-invariant, and `level` must be `law`.
    """
    if "forced" in settings:
        force_invariant(launch)
    engine = started(step, shape, running=256, gib=KV_GIB.get(shape, 8.0), **settings_of(runner, **settings))
    vocabulary = vocabulary_of(step.place, shape)
    if shape != "8B":
        exactness.SameSamples(step, engine, vocabulary).compare()
    if shape == "135M":
        step.tried("flips", lambda: exactness.flips(step, engine, vocabulary))
    decoding.our_times(step, engine, vocabulary)


def started(step: Measurements, shape: str, pool=None, **settings) -> CheckedEngine:
    """Starts an engine on a shape's model, and returns it. Raises StepEnds if it does not start."""
    found: list[CheckedEngine] = []

    def start() -> dict:
        model, arguments = made(step.place, shape)
        found.append(CheckedEngine(config_of(step.place, model, **arguments, **settings), pool))
        return found[0].about()

    step.must(f"start of {shape}", start)
    return found[0]
