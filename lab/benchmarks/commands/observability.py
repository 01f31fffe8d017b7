"""`tailrace bench observability`: the cost of metrics, traces and a board, for the coordinator and for an engine."""

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say

CHUNK_TOKENS = 64


@click.command("observability")
@click.option("--part", type=click.Choice(["both", "coordinator", "engine"]), default="both", show_default=True)
@click.option("--replicas", type=click.IntRange(1, 8_192), default=512, show_default=True, help="Modelled engines.")
@click.option("--running", type=click.IntRange(1, 1_024), default=64, show_default=True, help="Samples of a replica.")
@click.option("--speed", type=click.FloatRange(0.01, 100), default=1.0, show_default=True, help="Times the real pace.")
@click.option("--pairs", type=click.IntRange(min=1), default=6, show_default=True, help="Of windows of 10 s.")
@click.option("--every-group", is_flag=True, help="Spans of all groups, as with a sampler in OTEL_TRACES_SAMPLER.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Of the engine's full batch.")
@click.option("--steps", type=click.IntRange(min=8), default=300, show_default=True, help="With vLLM's own figures.")
@AS_JSON
def command(part, replicas, running, speed, pairs, every_group, rounds, steps, as_json):
    """Measure the shares that metrics, traces and a board add to the coordinator's loop and to an engine's step.

    Coordinator and engine are each measured with and without them in one run. The real coordinator serves a modelled
    fleet as in `bench fleet`; the engine has the demo model. A collector's process takes the spans. vLLM's own figures
    are measured too; the service leaves them off.
    """
    from tailrace.app.model import resolve_model
    from tailrace.lab.benchmarks.control_plane.fleet import one
    from tailrace.lab.benchmarks.control_plane.fleet_coordinator import Fleet
    from tailrace.lab.benchmarks.observability.engine_cost import measure
    from tailrace.lab.benchmarks.observability.tracing_cost import collector

    found = {}
    with collector():
        if part != "engine":
            fleet = Fleet(replicas, running, 1.0, speed, past=False, observed_pairs=pairs, every_group=every_group)
            whole = one(fleet, say)
            sizes = {"replicas": replicas, "running": running, "problems": whole["problems"]}
            found["coordinator"] = sizes | whole["observed"]
        if part != "coordinator":
            config = load_config(DEFAULT_CONFIG).application.args.engine
            config = config.model_copy(update={"model": str(resolve_model(config.model))})
            found["engine"] = measure(config, CHUNK_TOKENS, rounds, steps, say)
    print_result(found, as_json)
