"""`tailrace bench control`: the cost of the control plane's calls, decisions, keys and messages."""

import json

import click


@click.command("control")
@click.option("--calls", type=click.IntRange(min=64), default=1_500, show_default=True, help="Of each kind.")
@click.option("--keys", type=click.IntRange(min=64), default=50_000, show_default=True, help="Of the pool.")
@click.option("--samples", type=click.IntRange(min=1_024), default=16_384, show_default=True, help="Of the core.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(calls, keys, samples, as_json):
    """Measure microseconds of calls, decisions, keys and messages: Serve, an actor, the pool's master, the core,
    ZeroMQ.

    The engines behind a real Serve application do nothing. About two minutes. docs/measurements/scale.md uses the
    figures.
    """
    from tailrace.lab.benchmarks.control_plane.control import measure

    result = measure(calls, keys, samples, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, found in result.items():
        click.echo(f"{name:16} {found if not isinstance(found, dict) else json.dumps(found)}")
