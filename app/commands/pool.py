"""`tailrace pool ...`: shows or empties the KV pool. `lab/commands/pool.py` adds its checks."""

import asyncio
import json

import click

from tailrace.app.errors import BadInput

ADDRESS = click.option("--address", default="auto", show_default=True, help="A running cluster: auto, or host:port.")
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
