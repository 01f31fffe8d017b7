"""Parts of `bench overhead` that need no vLLM: timers around parts, and ratios of engines."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from tailrace.app.cli import run
from tailrace.app.errors import Failed
from tailrace.lab.benchmarks.engine.overhead import figures, ratios, tables
from tailrace.lab.benchmarks.engine.overhead_engines import OurEngine, TimedSteps
from tailrace.lab.benchmarks.engine.recorded_kernels import MOST_VALUES, RecordedKernels
from tailrace.lab.benchmarks.engine.step_parts import OUTSIDE, StepParts


class Work:
    """Calls that take a second of their clock each, besides those that they call."""

    def __init__(self):
        self.now_s = 0.0

    def outer(self) -> str:
        self.now_s += 1.0
        self.inner()
        return self.inner()

    def inner(self) -> str:
        self.now_s += 1.0
        return "done"

    def broken(self) -> None:
        self.now_s += 1.0
        raise ValueError("broken")


def test_a_part_has_its_own_time_alone():
    work = Work()
    parts = StepParts(lambda: work.now_s)
    parts.wrap(work, "outer", "outer")
    parts.wrap(work, "inner", "inner", "broken")
    work.now_s += 5.0
    assert work.outer() == "done"
    assert parts.take() == {OUTSIDE: 5.0, "outer": 1.0, "inner": 2.0}
    with pytest.raises(ValueError, match="broken"):
        work.broken()
    work.now_s += 1.0
    assert parts.take() == {OUTSIDE: 1.0, "inner": 1.0}, "a call that raises has ended, too"


def steps(process_s: float, model_s: float, sampler_s: float) -> TimedSteps:
    parts_s = {"model": model_s, "sampler": sampler_s, "runner": 0.01, "proposals": 0.003, "feed": 0.001}
    return TimedSteps(steps=2, tokens=32, drafted=8, wall_s=2 * process_s, process_s=process_s, parts_s=parts_s)


def test_ratios_are_of_the_same_rounds():
    """The second round is slow for all of them, as on a busy machine; its ratios are those of the first."""
    taken = {
        "stock": [steps(0.20, 0.1, 0.08), steps(2.0, 1.0, 0.8)],
        "off": [steps(0.16, 0.1, 0.02), steps(1.6, 1.0, 0.2)],
        "miss": [steps(0.24, 0.1, 0.02), steps(2.4, 1.0, 0.2)],
    }
    found = ratios(taken)
    assert found == {"outside_ratio": 2.0, "miss_ratio": 1.5, "miss_wall_ratio": 1.5}
    assert ratios({"off": taken["off"]}) == {}


def test_the_host_of_the_second_runner_is_all_of_its_thread_but_model_and_kernels():
    def second(kernels_s: float, sampler_s: float) -> TimedSteps:
        parts_s = {"model": 1.0, "kernels": kernels_s, "sampler": sampler_s, "runner": 0.5}
        return TimedSteps(steps=2, tokens=2, drafted=0, wall_s=9.0, process_s=9.0, parts_s=parts_s)

    found = ratios({"stock": [second(3.0, 1.5)], "off": [second(4.0, 1.0)]})
    assert found["host_ratio"] == 0.75


class Grid:
    """Stands for Triton's GridExecutor: a launch adds 1 to its first tensor."""

    def __init__(self, fn: str):
        self.fn = fn

    def __call__(self, tensor, *, other=None) -> None:
        tensor += 1


def test_a_recorded_launch_writes_what_it_wrote_and_another_one_is_run():
    grid, runner = type("Own", (Grid,), {}), SimpleNamespace(execute_model=lambda: None)
    kernels, large = RecordedKernels(grid, runner), torch.zeros(MOST_VALUES + 1)

    def step(*more: str) -> list[float]:
        runner.execute_model()
        tensors = [torch.zeros(1) for _ in range(2 + len(more))]
        for name, tensor in zip(("first", *more, "last"), tensors, strict=True):
            grid(name)(tensor, other=large)
        return [float(tensor) for tensor in tensors]

    first = torch.full((1,), 4.0)
    with kernels.record():
        runner.execute_model()
        grid("first")(first)
        grid("last")(torch.full((1,), 7.0), other=large)
    assert step() == [5.0, 8.0]
    assert step("between") == [5.0, 1.0, 8.0], "a launch that is not in the record"
    kernels.stop()
    assert step() == [1.0, 1.0]


def test_figures_are_of_a_step():
    found = figures(16, [steps(0.1, 0.04, 0.02)] * 3)
    assert (found["wall_ms"], found["process_ms"], found["outside_ms"]) == (100.0, 50.0, 20.0)
    assert found["proposal_ms_per_step"] == 2.0
    assert (found["tokens"], found["drafted"]) == (1.0, 0.25)
    (table,) = tables({"samples": {16: {"off": found, "outside_ratio": 1.0}}})
    assert table.row_count == 11 and table.caption == "outside_ratio 1.0"


@pytest.mark.parametrize("samples", ["", "0", "16,x", "1000"])
def test_other_numbers_of_samples_are_refused(capsys, samples):
    assert run(["bench", "overhead", "--samples", samples]) == 2
    assert "--samples" in capsys.readouterr().err


class StoppedLoop:
    """The loop of an engine that stops at the first chunk. More turns than a few are a benchmark that hangs."""

    problem, turns = "a step failed", 0

    def submit(self, chunk, on_done) -> None:
        """Takes no chunk."""

    def abort(self, chunk_id: str) -> None:
        """Has no chunk."""

    def turn(self, _wait_s: float) -> bool:
        self.turns += 1
        assert self.turns < 10
        return False


def test_an_engine_that_has_stopped_ends_the_benchmark():
    """Otherwise its prompts would be waited for without end, and its steps would take no time."""
    engine = OurEngine.__new__(OurEngine)
    engine.begun, engine.names, engine._kv, engine._replayed, engine._policy = 0, [], None, False, None
    engine._loop, engine._stepper = StoppedLoop(), SimpleNamespace(_running={}, busy=True)
    for act in (lambda: engine.begin(1), engine.turn, engine.end):
        with pytest.raises(Failed, match="an engine has stopped: a step failed") as raised:
            act()
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value), "it crosses to the parent process"
