"""`tailrace pool verify` and `pool chaos`: rollouts that check the clean-up and the failures of the KV pool."""

import json
from pathlib import Path

import click

from tailrace.app.allow_code import allow_code_option
from tailrace.app.commands.pool import AS_JSON, command
from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput, Failed
from tailrace.app.files.prompts import read_prompts
from tailrace.lab.demo import PROMPTS

CHAOS_PROMPTS = 8


@command.command()
@click.option("--prompts", type=click.Path(path_type=Path), default=PROMPTS, show_default="the demo's")
@click.option("--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Per sample.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@allow_code_option
@AS_JSON
def verify(prompts, samples, max_tokens, config, as_json):
    """Roll out on a local service and check that no key, byte or process is left afterwards."""
    file = load_config(config)
    if file.application.args.pool is None:
        raise BadInput(f"{config}: applications.0.args.pool is null: there is no pool to verify")
    wanted = read_prompts(prompts, {"samples": samples, "max_tokens": max_tokens, "sampling": {}})
    from tailrace.lab.verification.leftovers import measure

    result = measure(file, wanted, lambda text: click.echo(text, err=True))
    click.echo(json.dumps(result) if as_json else "\n".join(f"{key:24} {value}" for key, value in result.items()))
    left = {key: result[key] for key in ("keys", "bytes", "processes") if result[key]}
    if left:
        raise Failed(f"left over: {', '.join(f'{count} {name}' for name, count in left.items())}")
    if not result["keys_meanwhile"] and not result["pool_tokens"]:
        raise Failed("the pool held no key during the rollout, so there was nothing to leave; give more --max-tokens")


@command.command()
@click.option("--prompts", type=click.Path(path_type=Path), default=PROMPTS, show_default="8 of the demo's")
@click.option("--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=96, show_default=True, help="Per sample.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@allow_code_option
@click.option("--only", "names", multiple=True, help="A disturbance; may be repeated. Default: all.")
@AS_JSON
def chaos(prompts, samples, max_tokens, config, names, as_json):
    """Disturb the pool of a local service during a rollout: no token may change, every sample must end in time."""
    file = load_config(config)
    if file.application.args.pool is None:
        raise BadInput(f"{config}: applications.0.args.pool is null: there is no pool to disturb")
    defaults = {"samples": samples, "max_tokens": max_tokens, "sampling": {"temperature": 1.0}}
    wanted = read_prompts(prompts, defaults)[: CHAOS_PROMPTS if prompts == PROMPTS else None]
    from tailrace.deployments.messages.rollout import RolloutBatch
    from tailrace.lab.verification.chaos import DISTURBANCES, measure

    known = [disturbance.name for disturbance in DISTURBANCES]
    if unknown := next((name for name in names if name not in known), None):
        raise BadInput(f"--only {unknown}: no such disturbance; known: {', '.join(known)}")
    batch = RolloutBatch(batch_id="chaos", groups=wanted)
    result = measure(file, batch, names, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print_chaos(result)
    if bad := next((run for run in result["runs"] if run["wrong"]), None):
        raise Failed(f"{bad['name']}: {bad['wrong']}")


def _print_chaos(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("disturbance", "disturbance", "identical", "ended", "counts", "longest waits, ms")
    for run in result["runs"]:
        counts = "\n".join(f"{name} {count:,}" for name, count in run["counts"].items())
        waits = "\n".join(f"{name} {bucket}" for name, bucket in run["longest_wait_ms"].items())
        table.add_row(run["name"], run["done"], str(run["identical"]), str(run["samples_ended"]), counts, waits)
    Console().print(table)
