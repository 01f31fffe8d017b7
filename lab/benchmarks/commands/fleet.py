"""`tailrace bench fleet`: the coordinator with hundreds of modelled engines."""

from pathlib import Path

import click

from tailrace.app.files.output_file import OutputFile, OutputKind
from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say

PROFILED = OutputKind("a profile of `bench fleet`", (b"{",), (b"fleet_coordinator.py",))


@click.command("fleet")
@click.option(
    "--replicas", type=click.IntRange(1, 8_192), multiple=True, default=(128, 512, 2_048), show_default=True,
    help="Sizes, one after another.",
)  # fmt: skip
@click.option("--running", type=click.IntRange(1, 1_024), default=64, show_default=True, help="Samples of a replica.")
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Of measuring.")
@click.option("--speed", type=click.FloatRange(0.01, 100), default=1.0, show_default=True, help="Times the real pace.")
@click.option("--past", is_flag=True, help="Make and keep earlier tokens too: 290 KB a sample.")
@click.option("--profile", type=click.Path(path_type=Path), help="A file for cProfile, of the coordinator's loop.")
@AS_JSON
def command(replicas, running, seconds, speed, past, profile, as_json):
    """Measure the real coordinator's share of a core, delays and memory over the real wire, with modelled engines.

    Answers have 20,000 tokens at 50 tokens/s, groups have 16 samples, chunks 8,192 tokens. docs/measurements/scale.md
    uses the figures.
    """
    file = OutputFile.of(profile, "--profile", PROFILED)
    from tailrace.lab.benchmarks.control_plane.fleet import measure

    print_result(measure(replicas, running, seconds, speed, past, file, say), as_json)
