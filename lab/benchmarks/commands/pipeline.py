"""`tailrace bench pipeline`: pipelines over training steps, simulated."""

from pathlib import Path

import click

from tailrace.app.errors import BadInput
from tailrace.lab.benchmarks.commands.output import AS_JSON, picture_file, print_result, say


@click.command()
@click.option("--workload", default="rhyme-14b-16k", show_default=True, help="A paper's set-up by name, or a file.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Draws of the workload.")
@click.option("--scale", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True,
              help="Share of replicas and prompts.")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path), default=None, help="A picture of all runs, .png or .svg.")
@AS_JSON
def command(workload, steps, seeds, scale, plot, as_json):
    """Simulate pipelines over training steps: barriers, a naive pipeline and HistoPipe's tiers, beside RhymeRL's
    claims.
    """
    plot = picture_file(plot)
    from tailrace.lab.research.histopipe.bench import measure
    from tailrace.lab.simulator.scenario import load_scenario

    try:
        scenario = load_scenario(workload)
    except ValueError as error:
        raise BadInput(f"--workload {error}") from error
    result = measure(scenario.scaled(scale) if scale < 1 else scenario, steps, seeds, say)
    if plot is not None:
        from tailrace.lab.research.histopipe.picture import pipelines

        pipelines(plot, result)
    print_result(result, as_json)
