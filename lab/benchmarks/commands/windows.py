"""`tailrace bench windows`: the cost of canonical windows, and the flips without and with them."""

import click

from tailrace.lab.benchmarks.commands.output import AS_JSON, numbers, print_result, say


@click.command("windows")
@click.option("--samples", default="4,16,64", show_default=True, help="Samples at once, with commas between.")
@click.option("--windows", default="4,8,16,32,64", show_default=True, help="Rows of a window, with commas between.")
@click.option("--tokens", type=click.IntRange(1, 512), default=128, show_default=True, help="Of a sample for flips.")
@AS_JSON
def command(samples, windows, tokens, as_json):
    """Measure the cost of exactness bits in bfloat16 on a CPU: a step with canonical windows over a step without them.

    Costs are by number of samples and by rows of a window. The demo model runs on one core. Flips are counted between
    16 samples at once and the same samples one by one. About a quarter of an hour.
    """
    counts, sizes = numbers(samples, "--samples", 256), numbers(windows, "--windows", 256)
    from tailrace.app.model import resolve_model
    from tailrace.lab.benchmarks.engine.canonical_windows import measure

    print_result(measure(str(resolve_model("demo")), counts, sizes, tokens, say), as_json)
