"""`tailrace logs`: all that a service knows of one sample, or of one batch."""

import asyncio
import json
import time

import click

from tailrace.app.errors import BadInput


@click.command()
@click.argument("name", metavar="SAMPLE|BATCH")
@click.option("--address", default="auto", show_default=True, help="A running cluster: auto, or host:port.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(name, address, as_json):
    """Show a sample's chunks, moves, reasons and faults; or a batch's progress, faults and samples.

    SAMPLE is as `tailrace top` and the board show it, or BATCH/PROMPT#INDEX; BATCH is its batch id. Samples that have
    ended are known until 2,000 others have. Texts are not shown.
    """
    from tailrace.app.cluster import connect
    from tailrace.deployments.messages.roles import Role
    from tailrace.deployments.messages.status import SampleLog

    found = asyncio.run(_log(connect(address, role=Role.OBSERVER), name))
    if found is None:
        kind = "sample" if "#" in name else "batch"
        raise BadInput(f"no {kind} {name!r} is known to the service, or not any more; `tailrace status` lists some")
    if as_json:
        click.echo(json.dumps(found.model_dump(mode="json")))
        return
    from rich.console import Console

    from tailrace.app.watch.log_tables import batch_view, sample_view

    Console().print((sample_view if isinstance(found, SampleLog) else batch_view)(found, time.time()))


async def _log(client, name: str):
    """Returns the log of a sample, or of a batch, whose id may have the mark of samples, too; or None."""
    found = await client.sample_log(name) if "#" in name else None
    return await client.batch_log(name) if found is None else found
