"""`tailrace bench weights`: seconds of a weights update, through a folder and through memory."""

from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say


@click.command("weights")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Updates of each mode.")
@click.option("--samples", type=click.IntRange(min=1), default=8, show_default=True, help="Decoding meanwhile.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@AS_JSON
def command(repeats, samples, config, as_json):
    """Update two replicas that decode, by folder and by memory; then kill one, at rest and in mid-update.

    `trainer_blocked_s`: seconds until the trainer may change its tensors. `engine_paused_s`: seconds without a token,
    by replica. About four minutes.
    """
    file = load_config(config)
    from tailrace.lab.benchmarks.live.weights import measure

    print_result(measure(file, repeats, samples, say), as_json)
