"""The process of one step: `python -m tailrace.lab.benchmarks.gpu.steps NAME PLACE`. Exit
code 1 when a measurement failed."""

import os
import sys
import traceback
from importlib import import_module

from tailrace.lab.benchmarks.gpu import catalog
from tailrace.lab.benchmarks.gpu.driver import DONE, FAILED, CheckStep, StepEnded
from tailrace.lab.benchmarks.gpu.measurements import NEEDS_CARD, Measurements, StepEnds
from tailrace.lab.benchmarks.gpu.place import Place
from tailrace.lab.benchmarks.gpu.result_lines import ResultLines


def run_step(step: CheckStep, place: Place) -> StepEnded:
    """Runs a step in this process."""
    module, name = step.run.split(":")
    measurements = Measurements(step.name, place)
    try:
        getattr(import_module(module), name)(measurements, **step.settings)
    except StepEnds as error:
        return StepEnded(FAILED, f"{error} failed")
    except Exception as error:  # noqa: BLE001 - the edge of the step: its error is a result
        traceback.print_exc()
        return StepEnded(FAILED, f"{type(error).__name__}: {str(error)[:500]}")
    return StepEnded(FAILED, f"{measurements.failed} measurements failed") if measurements.failed else StepEnded(DONE)


def look_at(step: CheckStep, place: Place) -> StepEnded:
    """Imports a step that needs a card, and builds what it would give to its engine."""
    import_module(step.run.split(":")[0]).inputs(place, **step.settings)
    return StepEnded(DONE, NEEDS_CARD)


def main() -> int:
    """Returns the exit code."""
    name, place = sys.argv[1:]
    step = next(step for step in (*catalog.STEPS, catalog.WARM_UP) if step.name == name)
    ended = run_step(step, Place.read(place))
    if ended.how != DONE:
        ResultLines(Place.read(place).out).add(name, what="the step", error=ended.reason)
        print(f"{name}: {ended.reason}", file=sys.stderr)
    return int(ended.how != DONE)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the engine need not end in good order; the driver kills all that it started
