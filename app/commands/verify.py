"""`python -m app verify`: exit 0 when scheduling changed no token, 1 with sample and position when it did."""

import json
from pathlib import Path

import click

from app.config import DEFAULT_CONFIG, load_config
from app.demo import PROMPTS
from app.errors import Failed
from app.prompts_file import read_prompts


@click.command()
@click.option("--prompts", type=click.Path(path_type=Path), default=PROMPTS, show_default="the demo's")
@click.option("--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Per sample.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@click.option("--corrupt", "corrupted", is_flag=True, help="Change one token of the last run: the check must fail.")
@click.option("--json", "as_json", is_flag=True, help="The certificate as one JSON object, the last line of stdout.")
def command(prompts, samples, max_tokens, seed, config, corrupted, as_json):
    """Show that tokens and logprobs do not depend on chunks, replicas, batch, drafts or a crash."""
    file = load_config(config)
    sampling = {"temperature": 1.0}
    wanted = read_prompts(prompts, {"samples": samples, "max_tokens": max_tokens, "sampling": sampling})
    from app.verify import RUNS, certificate, corrupt, roll_all
    from deployments.messages import RolloutBatch

    batch = RolloutBatch(batch_id="verify", groups=wanted, seed=seed)
    rolled = roll_all(file, batch, lambda text: click.echo(text, err=True))
    if corrupted:
        last = rolled[RUNS[-1].name]
        last["groups"] = corrupt(last["groups"])
    result = certificate(rolled)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)
    wrong = next((run for run in result["runs"] if not run["identical"]), None)
    if wrong is not None:
        at = wrong["first_difference"]
        raise Failed(
            f"run {wrong['name']} differs: prompt {at['prompt_id']!r} sample {at['sample_index']} "
            f"position {at['position']}: {at['what']}"
        )


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['samples']} samples, {result['tokens']} tokens")
    for column in ("run", "identical", "chunked", "moved", "drafted", "logprob noise", "note"):
        table.add_column(column)
    for run in result["runs"]:
        cells = (run["name"], run["identical"], run["chunked_share"], run["moved_samples"], run["drafted_tokens"])
        table.add_row(*map(str, cells), f"{run['max_logprob_difference']:.1e}", run["note"] or "")
    Console().print(table)
