"""`tailrace verify --train`: exit 0 if no bit of a training changed, 1 with step and field if one did."""

import json
from collections.abc import Callable

import click

from tailrace.app.config import ServeFile
from tailrace.app.errors import Failed

SIZE = {"groups": 3, "samples": 4, "max_tokens": 48}
"""Size of a step: the demo model then takes about ten seconds for its gradients on two cores."""


def verify_train(file: ServeFile, steps: int, corrupted: bool, as_json: bool, say: Callable[[str], None]) -> None:
    """Trains the configured model twice, and prints the comparison. Raises Failed if a run differs or lacks something.

    `corrupted`: the second run adds gradients in a wrong order, which the comparison must find.
    """
    from tailrace.lab.training_certificate.runs import measure, training

    config = training(file.application.args.engine.model, steps, **SIZE)
    result = measure(file, config, corrupted, say)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)
    everything = result["runs"][-1]
    if (difference := everything["first_difference"]) is not None:
        raise Failed(
            f"step {difference['step']} differs in {difference['field']}: "
            f"{difference['expected']} by the plain run, {difference['got']} by the other"
        )
    if not result["identical"]:
        raise Failed(f"all steps are equal, but the runs lack: {', '.join(result['lacks'])}")


def _print(result: dict) -> None:
    from tailrace.lab.verification.closeness import sentences

    click.echo(f"{result['steps']} steps, {result['tokens']} tokens; identical to the bit: {result['identical']}")
    for line in sentences(result):
        click.echo(line)
    for run in result["runs"]:
        figures = (f"{key.replace('_', ' ')} {run[key]}" for key in ("seconds", "moved_samples", "drafted_tokens"))
        click.echo(f"{run['name']}: {', '.join(figures)}")
        for note in run["notes"]:
            click.echo(f"  {note}")
