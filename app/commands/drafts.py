"""`tailrace drafts ...`: the sources of drafts."""

import asyncio
import json
import sqlite3
from pathlib import Path

import click

from tailrace.app.errors import BadInput, Failed


@click.group()
def command():
    """Show the sources of drafts."""


@command.command()
@click.argument("group")
@click.option("--address", default="auto", show_default=True, help="A running cluster: auto, or host:port.")
@click.option("--history-dir", type=click.Path(path_type=Path), help="Read these history files, without a service.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def inspect(group, address, history_dir, as_json):
    """Show a GROUP (prompt id, prompt key or group id): its samples in flight and its earlier epochs."""
    known = _offline(group, history_dir) if history_dir else _ask(group, address)
    if known is None:
        where = f"no history of it in {history_dir}" if history_dir else "none in flight, and no history of one"
        raise BadInput(f"{group}: no such group: {where}")
    if as_json:
        click.echo(json.dumps(known))
    else:
        _print(known)


def _ask(group: str, address: str) -> dict | None:
    from tailrace.app.cluster import connect

    return asyncio.run(connect(address).inspect_group(group))


def _offline(group: str, history_dir: Path) -> dict | None:
    """Returns the same mapping as a shard, from the files alone."""
    from tailrace.deployments.context.archive import Archive
    from tailrace.deployments.context.context_config import ContextConfig
    from tailrace.deployments.context.prompt_files import EVERY

    archive = Archive(ContextConfig(history_dir=str(history_dir.absolute())), EVERY)
    try:
        found = archive.find(group)
        if archive.problem:
            raise BadInput(archive.problem)
        if found is None:
            return None
        prompt_key, group_id = found
        epochs = [epoch._asdict() for epoch in archive.of(prompt_key).epochs(prompt_key)]
    except sqlite3.Error as error:
        raise Failed(f"history: {error}") from error
    return {"group_id": group_id, "prompt_key": prompt_key, "samples": [], "history": epochs, "problem": ""}


def _print(known: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"group {known['group_id']}, prompt key {known['prompt_key']}", highlight=False, markup=False)
    if known["problem"]:
        console.print(known["problem"], style="red", highlight=False, markup=False)
    running = [sample for sample in known["samples"] if not sample["finished"]]
    total_tokens = sum(sample["tokens"] for sample in known["samples"])
    ended = len(known["samples"]) - len(running)
    console.print(f"in flight: {len(running)} running, {ended} finished, {total_tokens:,} tokens", highlight=False)
    if known["samples"]:
        table = Table("sample", "tokens", "finished")
        for sample in known["samples"]:
            table.add_row(str(sample["sample_index"]), f"{sample['tokens']:,}", "yes" if sample["finished"] else "")
        console.print(table)
    table = Table("epoch", "answers", "mean length", "mean reward", "bytes", title="history")
    for epoch in known["history"]:
        reward = "" if epoch["mean_reward"] is None else f"{epoch['mean_reward']:.3f}"
        length, size = f"{epoch['mean_length_tokens']:,.0f}", f"{epoch['packed_bytes']:,}"
        table.add_row(str(epoch["epoch"]), f"{epoch['answers']:,}", length, reward, size)
    console.print(table)
