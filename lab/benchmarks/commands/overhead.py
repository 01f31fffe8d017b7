"""`tailrace bench overhead`: the time that Tailrace adds to a step of vLLM's engine."""

import json

import click

from tailrace.lab.benchmarks.commands.output import numbers, say

MOST_SAMPLES = 512


@click.command("overhead")
@click.option("--samples", default="16,64,256", show_default=True, help="Samples at once, with commas between.")
@click.option("--pool", is_flag=True, help="Also an engine with a KV pool.")
@click.option("--v2", is_flag=True, help="Also vLLM's second runner, its kernels interpreted: the host's time alone.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(samples, pool, v2, as_json):
    """Compare milliseconds of a step of our engine and of stock vLLM's, with drafts off, missing and hitting, and time
    the parts of ours.

    The model is random and has two layers and a vocabulary of 49,152 tokens; it runs on one core. The engines take
    turns, a few steps each. Parts are processor time of the step's thread, by timers around them. A few minutes, and 1
    GiB of memory for each engine.
    """
    counts = numbers(samples, "--samples", MOST_SAMPLES)
    from tailrace.app.model import resolve_model
    from tailrace.lab.benchmarks.engine.overhead import measure, tables

    result = measure(resolve_model("demo"), counts, pool, v2, say)
    if as_json:
        click.echo(json.dumps(result))
        return
    from rich.console import Console

    Console().print(*tables(result))
