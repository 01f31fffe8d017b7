"""`tailrace bench http`: the gateway beside `vllm serve`."""

from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say


@click.command("http")
@click.option(
    "--requests", type=click.IntRange(min=8, max=2_000), default=1_000, show_default=True, help="Open at once."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1, max=256), default=16, show_default=True, help="Of each answer."
)
@click.option(
    "--running", type=click.IntRange(min=1), default=64, show_default=True, help="Samples in an engine's step."
)
@click.option(
    "--temperature", type=click.FloatRange(min=0.0), default=1.0, show_default=True, help="0: no server draws noise."
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Turns; medians count.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=DEFAULT_CONFIG.with_name("serve.http.yaml"),
    show_default="serve.http.yaml",
    help="Of our service; its model, its replicas and its gateway are replaced.",
)
@AS_JSON
def command(requests, max_tokens, running, temperature, repeats, config, as_json):
    """Compare completions over HTTP, all open at once: our gateway and `vllm serve`, each with one engine of a tiny
    random model.

    Both get the same client, bodies and engine settings, without drafts. Both servers run throughout, and take turns.
    About three minutes.
    """
    file = load_config(config)
    from tailrace.lab.benchmarks.http.http import HttpLoad, measure

    print_result(measure(file, HttpLoad(requests, max_tokens, temperature), running, repeats, say), as_json)
