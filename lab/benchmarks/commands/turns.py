"""`tailrace bench turns`: samples of several turns with tools, held between turns or sent as new requests."""

from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput
from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say


@click.command("turns")
@click.option("--workload", default="tools-8b", show_default=True, help="A set-up with turns, by name or file.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Draws of the workload.")
@click.option("--scale", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True,
              help="Share of replicas and prompts.")  # fmt: skip
@click.option("--drafting", default="goodput", show_default=True,
              help="A drafting policy; off shows what KV and lengths alone bring.")  # fmt: skip
@click.option("--live", is_flag=True, help="Instead: on the replicas of --config, with its model.")
@click.option("--prompts", type=click.IntRange(min=1), default=6, show_default=True, help="With --live.")
@click.option("--samples", type=click.IntRange(min=1), default=4, show_default=True, help="With --live: per prompt.")
@click.option("--turns", type=click.IntRange(min=2), default=5, show_default=True, help="With --live: per sample.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="With --live.")
@click.option("--turn-tokens", type=click.IntRange(min=1), default=48, show_default=True,
              help="With --live: most tokens of a turn.")  # fmt: skip
@click.option("--tool-s", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              help="With --live: mean seconds of a tool.")  # fmt: skip
@click.option("--tool-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="With --live.")
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True,
              help="With --live: the median of each counts.")  # fmt: skip
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@AS_JSON
def command(workload, seeds, scale, drafting, live, config, as_json, repeats, **sizes):
    """Compare samples that are held between turns with tools against each turn as a new request.

    `recomputed_share`: share of the context that had been computed before a turn begins and is computed again.
    Simulated at the size of a cluster, in about five minutes; with --live on real replicas, in about as long.
    """
    result = _live(config, repeats, sizes) if live else _simulated(workload, seeds, scale, drafting)
    print_result(result, as_json)


def _simulated(workload: str, seeds: int, scale: float, drafting: str) -> dict:
    from tailrace.lab.benchmarks.control_plane.turns import measure
    from tailrace.lab.simulator.scenario import load_scenario
    from tailrace.policies.families.registry import Policies

    try:
        Policies(drafting=drafting)
    except ValueError as error:
        raise BadInput(f"--drafting {drafting}: no such policy; `tailrace policies` lists them") from error
    try:
        scenario = load_scenario(workload)
    except ValueError as error:
        raise BadInput(f"--workload {error}") from error
    if scenario.turns is None:
        raise BadInput(f"--workload {workload}: its samples have one turn; give a set-up with `turns`, as tools-8b has")
    return measure(scenario.scaled(scale) if scale < 1 else scenario, seeds, drafting, say)


def _live(config: Path, repeats: int, sizes: dict) -> dict:
    file = load_config(config)
    engine = file.application.args.engine
    longest = sizes["prompt_tokens"] + sizes["turns"] * (sizes["turn_tokens"] + sizes["tool_tokens"])
    if longest > engine.max_model_len:
        raise BadInput(f"--turns: {longest} tokens of context; engine.max_model_len is {engine.max_model_len}")
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.lab.benchmarks.live.turns import TurnsWorkload, measure

    encode = Prompts(str(resolve_model(engine.model)), engine.max_model_len).encode
    return measure(file, TurnsWorkload(encode=encode, **sizes), repeats, say)
