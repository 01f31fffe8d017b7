"""The process of one step: `python -m tailrace.lab.benchmarks.gpu.steps NAME PLACE`.

The exit code is 1 if the step failed, PARTLY_CODE if only some of its measurements did, UNLIKE_CODE if tokens or bytes
differ that must be the same.
"""

import os
import sys
import traceback
from importlib import import_module

from tailrace.lab.benchmarks.gpu import catalog
from tailrace.lab.benchmarks.gpu.driver import (
    DONE,
    FAILED,
    PARTLY,
    PARTLY_CODE,
    UNLIKE,
    UNLIKE_CODE,
    CheckStep,
    StepEnded,
)
from tailrace.lab.benchmarks.gpu.measurements import NEEDS_CARD, Measurements, StepEnds
from tailrace.lab.benchmarks.gpu.place import Place
from tailrace.lab.benchmarks.gpu.result_lines import ResultLines


def run_step(step: CheckStep, place: Place) -> StepEnded:
    """Runs a step in this process. Returns how the step ended."""
    module, name = step.run.split(":")
    measurements = Measurements(step.name, place, step.settings.get("level", "bits"))
    try:
        getattr(import_module(module), name)(measurements, **step.settings)
    except StepEnds as error:
        return StepEnded(FAILED, f"{error} failed")
    except Exception as error:  # noqa: BLE001 - an error of the step is a result
        traceback.print_exc()
        return StepEnded(FAILED, f"{type(error).__name__}: {str(error)[:500]}")
    if measurements.unlike:
        return StepEnded(UNLIKE, f"not the same: {', '.join(measurements.unlike)}")
    return StepEnded(PARTLY, f"{measurements.failed} measurements failed") if measurements.failed else StepEnded(DONE)


def look_at(step: CheckStep, place: Place) -> StepEnded:
    """Imports the module of a step that needs a GPU, and builds the arguments of its engine. Does not run the step."""
    import_module(step.run.split(":")[0]).inputs(place, **step.settings)
    return StepEnded(DONE, NEEDS_CARD)


def main() -> int:
    """Runs the step that the command line names. Returns the exit code."""
    name, place = sys.argv[1:]
    step = next(step for step in (*catalog.STEPS, catalog.WARM_UP) if step.name == name)
    ended = run_step(step, Place.read(place))
    if ended.how != DONE:
        ResultLines(Place.read(place).out).add(name, what="the step", error=ended.reason)
        print(f"{name}: {ended.reason}", file=sys.stderr)
    return {DONE: 0, PARTLY: PARTLY_CODE, UNLIKE: UNLIKE_CODE}.get(ended.how, 1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # skips the engine's shutdown: the driver kills all that the engine started
