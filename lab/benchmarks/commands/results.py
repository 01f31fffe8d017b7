"""`tailrace bench results`: the delivery of results to a driver."""

import click

from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say


@click.command("results")
@click.option("--model", default="demo", show_default=True, help="A model's folder, for its tokenizer, or demo.")
@click.option("--samples", type=click.IntRange(min=16), default=32_768, show_default=True, help="Of the step.")
@click.option("--tokens", type=click.IntRange(min=1), default=4_096, show_default=True, help="Mean of a sample.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Of the long group.")
@AS_JSON
def command(model, samples, tokens, repeats, as_json):
    """Measure seconds and memory of a step's results in a driver that keeps them, and the delivery of a long group.

    For the long group: milliseconds from its last chunk to the driver, and for which the coordinator's loop is held.
    """
    from tailrace.app.model import resolve_model

    folder = str(resolve_model(model))
    from tailrace.lab.benchmarks.control_plane.results import measure

    print_result(measure(folder, samples, tokens, repeats, say), as_json)
