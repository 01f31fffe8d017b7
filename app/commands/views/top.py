"""`tailrace top`: a running service in the terminal, as it changes."""

import asyncio
import contextlib
import time

import click

ROWS = 18
"""Number of rows of the screen for all except replicas and samples."""


@click.command()
@click.option("--address", default="auto", show_default=True, help="A running cluster: auto, or host:port.")
@click.option(
    "--every-s", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--longest", type=click.IntRange(min=0), default=10, show_default=True, help="Samples shown.")
def command(address, every_s, longest):
    """Follow batches, replicas, the tail as it forms, the KV pool and troubles, until Ctrl-C.

    Without a terminal each look is printed below the one before. While the service is away, its last state stays.
    """
    from rich.console import Console

    from tailrace.app.cluster import connect
    from tailrace.deployments.messages.roles import Role

    client = connect(address, role=Role.OBSERVER)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_follow(client, Console(), every_s, longest))


async def _follow(client, console, every_s: float, longest: int) -> None:
    from rich.live import Live

    from tailrace.app.watch.rates import Rates
    from tailrace.app.watch.tables import view

    rates = Rates()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as screen:
        while True:
            status = await client.status(longest)
            rates.add(time.monotonic(), status)
            rows = max(3, console.height - ROWS - len(status.longest)) if console.is_terminal else len(status.replicas)
            drawn = view(status, rates, rows)
            if console.is_terminal:
                screen.update(drawn, refresh=True)
            else:
                console.print(drawn)
            await asyncio.sleep(every_s)
