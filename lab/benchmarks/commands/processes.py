"""`tailrace bench processes`: the share of a core that each process takes."""

from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say


@click.command("processes")
@click.option("--seconds", type=click.IntRange(min=5), default=90, show_default=True, help="While replicas work.")
@click.option("--idle", type=click.IntRange(min=5), default=30, show_default=True, help="Seconds while nothing runs.")
@click.option("--model", type=click.Choice(["tiny", "configured"]), default="tiny", show_default=True,
              help="Tiny: random, with steps of a few ms.")  # fmt: skip
@click.option("--head", is_flag=True, help="On a head as `tailrace serve` starts it, with dashboard.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@AS_JSON
def command(seconds, idle, model, head, config, as_json):
    """Measure the shares of a core by process, ours and Ray's, while two replicas work and while nothing runs; three
    minutes.
    """
    file = load_config(config)
    from tailrace.lab.benchmarks.live.processes import measure

    print_result(measure(file, model == "tiny", head, seconds, idle, say), as_json)
