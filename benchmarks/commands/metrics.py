"""`tailrace bench metrics`: metrics on against off, for the coordinator's loop and for an engine's step."""

import os

import click

from benchmarks.commands.output import AS_JSON, print_result, say


@click.command("metrics")
@click.option("--replicas", type=click.IntRange(1, 8_192), default=256, show_default=True, help="Modelled engines.")
@click.option("--running", type=click.IntRange(1, 1_024), default=64, show_default=True, help="Samples of a replica.")
@click.option("--speed", type=click.FloatRange(0.01, 100), default=1.0, show_default=True, help="Times the real pace.")
@click.option("--pairs", type=click.IntRange(min=1), default=6, show_default=True, help="Of windows of 10 s.")
@click.option("--model", default="demo", show_default=True, help="A folder, or demo: of the engine.")
@click.option("--chunks", type=click.IntRange(1, 64), default=8, show_default=True, help="That the engine runs.")
@click.option("--steps", type=click.IntRange(min=8), default=400, show_default=True, help="Of each kind.")
@click.option("--part", type=click.Choice(["both", "coordinator", "engine"]), default="both", show_default=True)
@AS_JSON
def command(replicas, running, speed, pairs, model, chunks, steps, part, as_json):
    """Share that metrics add to the coordinator's loop and to an engine's step, within one run each.

    The coordinator has modelled engines, as in `bench fleet`; the engine is a real one. vLLM's own figures are measured
    too: the service leaves them off.
    """
    from tailrace.app.model import resolve_model

    found = {}
    if part != "engine":
        from benchmarks.control_plane.fleet import one
        from benchmarks.control_plane.fleet_coordinator import Fleet

        fleet = Fleet(replicas, running, 1.0, speed, past=False, metrics_pairs=pairs)
        whole = one(fleet, say)
        found["coordinator"] = whole["metrics"] | {name: whole[name] for name in ("loop_share", "problems")}
    if part != "coordinator":
        from benchmarks.metrics.step_cost import measure
        from tailrace.deployments.vllm_exact.engine_config import EngineConfig

        config = EngineConfig(model=str(resolve_model(model)), max_running=chunks, max_model_len=2 * steps + 256)
        os.environ.update({"RAY_enable_metrics_collection": "true"})
        with _ray():
            found["engine"] = measure(config, chunks, steps, say)
    print_result(found, as_json)


def _ray():
    """A Ray of this machine alone."""
    from tailrace.app.cluster import LOOPBACK_ONLY

    os.environ.update(LOOPBACK_ONLY)
    import ray

    return ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
