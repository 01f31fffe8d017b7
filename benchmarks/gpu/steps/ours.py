"""Our engine: equal tokens however they are computed, and the times of its steps."""

from benchmarks.gpu.measurements import Measurements
from benchmarks.gpu.place import Place
from benchmarks.gpu.steps import decoding, exactness
from benchmarks.gpu.steps.engine import KV_GIB, CheckedEngine, config_of, let_vary, made, vocabulary_of
from tailrace.deployments.vllm_exact import launch


def inputs(place: Place, runner: str = "v1", shape: str = "135M", invariant: bool = True, backend: str | None = None):
    """The arguments that vLLM would get on a GPU."""
    given = {} if backend is None else {"attention_backend": backend}
    config = config_of(place._replace(card=True), f"a folder of {shape}", running=256, runner=runner, **given)
    return launch.engine_arguments(config), launch.process_settings(config, None), invariant


def exact(step: Measurements, runner: str) -> None:
    """Tokens of an eager engine."""
    engine = started(step, "135M", eager=True, runner=runner)
    exactness.SameSamples(step, engine, vocabulary_of(step.place, "135M")).compare()


def times(step: Measurements, runner: str, shape: str = "135M", invariant: bool = True, backend: str | None = None):
    """Tokens, flips, and times of steps, with CUDA graphs. A dummy model has times alone: all its words are alike."""
    if not invariant:
        let_vary(launch)
    given = {} if backend is None else {"attention_backend": backend}
    engine = started(step, shape, running=256, runner=runner, gib=KV_GIB.get(shape, 8.0), **given)
    vocabulary = vocabulary_of(step.place, shape)
    if shape != "8B":
        exactness.SameSamples(step, engine, vocabulary).compare()
    if shape == "135M":
        step.tried("flips", lambda: exactness.flips(step, engine, vocabulary))
    decoding.our_times(step, engine, vocabulary)


def started(step: Measurements, shape: str, pool=None, **settings) -> CheckedEngine:
    """Starts an engine on a shape's model. Raises StepEnds if it does not start."""
    found: list[CheckedEngine] = []

    def start() -> dict:
        model, arguments = made(step.place, shape)
        found.append(CheckedEngine(config_of(step.place, model, **arguments, **settings), pool))
        return found[0].about()

    step.must(f"start of {shape}", start)
    return found[0]
