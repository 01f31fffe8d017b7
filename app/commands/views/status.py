"""`tailrace status`: a running service at one moment."""

import json
import time

import click

LOOK_S = 1.0


@click.command()
@click.option("--address", default="auto", show_default=True, help="A running cluster: auto, or host:port.")
@click.option("--longest", type=click.IntRange(min=0), default=10, show_default=True, help="Samples shown.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(address, longest, as_json):
    """Show batches, replicas, the longest samples, the KV pool and troubles.

    Rates are over one second. `tailrace top` shows the same as it changes.
    """
    from tailrace.app.cluster import connect
    from tailrace.deployments.messages.roles import Role

    client = connect(address, role=Role.OBSERVER)
    if as_json:
        found = client.status_blocking(longest).model_dump(mode="json")
        samples = found.pop("longest")
        click.echo(json.dumps({"status": found, "longest": samples}))
        return
    from rich.console import Console

    from tailrace.app.watch.rates import Rates
    from tailrace.app.watch.tables import view

    rates = Rates()
    for pause_s in (0.0, LOOK_S):
        time.sleep(pause_s)
        status = client.status_blocking(longest)
        rates.add(time.monotonic(), status)
    Console().print(view(status, rates, len(status.replicas)))
