"""Parts of `bench overhead` that need no vLLM: timers around parts, and ratios of engines."""

import pytest

from tailrace.app.cli import run
from tailrace.lab.benchmarks.engine.overhead import figures, ratios, tables
from tailrace.lab.benchmarks.engine.overhead_engines import TimedSteps
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
