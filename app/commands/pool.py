"""`tailrace pool ...`: the content of the KV pool, emptying it, and checks of its clean-up and failures."""

import asyncio
import json
from pathlib import Path

import click

from tailrace.app.allow_code import allow_code_option
from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.demo import PROMPTS
from tailrace.app.errors import BadInput, Failed
from tailrace.app.files.prompts import read_prompts

ADDRESS = click.option("--address", default="auto", show_default=True, help="A running cluster: auto, or host:port.")
CHAOS_PROMPTS = 8
AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")


@click.group()
def command():
    """Show, drain and check the shared KV pool."""


@command.command()
@ADDRESS
@AS_JSON
def status(address, as_json):
    """Show bytes and keys by version and node, processes, tokens by the source of their KV, and failures by cause."""
    view = _ask(address, lambda client: client.pool_detail())
    if as_json:
        click.echo(view.model_dump_json())
    else:
        _print(view)


@command.command()
@ADDRESS
@AS_JSON
def drain(address, as_json):
    """Empty the pool. Samples in flight recompute their KV; no token changes."""
    removed = _ask(address, lambda client: client.drain_pool())
    click.echo(json.dumps({"removed_keys": removed}) if as_json else f"{removed} keys removed")


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
    from tailrace.app.verification.leftovers import measure

    result = measure(file, wanted, lambda text: click.echo(text, err=True))
    click.echo(json.dumps(result) if as_json else "\n".join(f"{key:24} {value}" for key, value in result.items()))
    left = {key: result[key] for key in ("keys", "bytes", "processes") if result[key]}
    if left:
        raise Failed(f"left over: {', '.join(f'{count} {name}' for name, count in left.items())}")


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
    from tailrace.app.verification.chaos import DISTURBANCES, measure
    from tailrace.deployments.messages.rollout import RolloutBatch

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


def _ask(address: str, question):
    from tailrace.app.cluster import connect

    answer = asyncio.run(question(connect(address)))
    if answer is None:
        raise BadInput(f"--address {address}: the service there has no pool (args.pool is null)")
    return answer


def _print(view) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", title="KV pool" if view.status else f"KV pool: down ({view.problem})")
    for name, value in (view.status or {}).items():
        for key, inner in value.items() if isinstance(value, dict) else [("", value)]:
            table.add_row(f"{name} {key}".strip(), json.dumps(inner))
    for replica_id, problem in view.problems.items():
        table.add_row(f"replica {replica_id}", f"runs without the pool: {problem}")
    for version, keys in (view.keys_by_version or {}).items():
        table.add_row(f"keys of weights {version}", f"{keys:,}")
    table.add_section()
    for name, count in view.counts.items():
        table.add_row(name, f"{count:,}")
    Console().print(table)
