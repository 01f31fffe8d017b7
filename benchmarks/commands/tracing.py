"""`tailrace bench tracing`: tracing on against off, for the coordinator and for an engine."""

import click

from benchmarks.commands.output import AS_JSON, print_result, say
from tailrace.app.config import DEFAULT_CONFIG, load_config

CHUNK_TOKENS = 64


@click.command("tracing")
@click.option(
    "--replicas", type=click.IntRange(0, 8_192), default=128, show_default=True, help="Of the fleet; 0: without."
)
@click.option("--running", type=click.IntRange(1, 1_024), default=64, show_default=True, help="Samples of a replica.")
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Of measuring.")
@click.option("--every-group", is_flag=True, help="Spans of all groups, as with a sampler in OTEL_TRACES_SAMPLER.")
@click.option("--rounds", type=click.IntRange(min=0), default=2, show_default=True, help="Of the engine; 0: without.")
@AS_JSON
def command(replicas, running, seconds, every_group, rounds, as_json):
    """More processor time with spans exported than without, by the thread's own clock, call by call, in one run.

    The real coordinator over a modelled fleet as in `bench fleet`, and one engine with the demo model. A collector's
    process takes the spans.
    """
    from benchmarks.control_plane.fleet import one
    from benchmarks.control_plane.fleet_coordinator import Fleet
    from benchmarks.engine.tracing import measure
    from benchmarks.engine.tracing_cost import collector
    from tailrace.app.model import resolve_model

    fleet = Fleet(replicas, running, seconds, 1.0, past=False, traced=True, every_group=every_group)
    config = load_config(DEFAULT_CONFIG).application.args.engine
    config = config.model_copy(update={"model": str(resolve_model(config.model))})
    with collector():
        found = {}
        if replicas:
            found["coordinator"] = {f"{replicas} replicas": one(fleet, say)}
        if rounds:
            found["engine"] = {f"{config.max_running} chunks": measure(config, CHUNK_TOKENS, rounds, say)}
    print_result(found, as_json)
