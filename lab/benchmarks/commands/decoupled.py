"""`tailrace bench decoupled`: a draft model beside the engine that verifies, measured and predicted."""

import json
from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput
from tailrace.app.files.prompts import read_prompts
from tailrace.lab.demo import PROMPTS


@click.command("decoupled")
@click.option("--drafter", required=True, help="A draft model's folder; `app distill-drafter` makes one.")
@click.option("--prompts", type=click.Path(path_type=Path), default=PROMPTS, show_default="the demo's")
@click.option(
    "--samples", type=click.IntRange(min=1), default=4, show_default=True, help="At once, of as many prompts."
)
@click.option("--max-tokens", type=click.IntRange(min=8), default=128, show_default=True, help="Per sample.")
@click.option("--window", type=click.IntRange(1, 32), default=4, show_default=True)
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(drafter, prompts, samples, max_tokens, window, config, as_json):
    """Compare coupled and decoupled drafting, with the samples' own noise and with other noise; about two minutes on
    two cores.

    `acceptance`: chance that a draft token is right if all before it are. `tokens_s`: tokens a second of each sample.
    `error`: what the planner predicts from the step times of both engines, over what was measured, less 1.
    """
    file = load_config(config)
    wanted = read_prompts(prompts, {"samples": 1, "max_tokens": max_tokens})
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.deployments.drafter.drafter_config import DrafterConfig
    from tailrace.deployments.messages.rollout import Rejected
    from tailrace.deployments.vllm_exact.tokenizer_check import vocabulary_refusal
    from tailrace.lab.benchmarks.drafting.decoupled import measure

    engine = file.application.args.engine
    target, model = resolve_model(engine.model), resolve_model(drafter)
    if (refusal := vocabulary_refusal(target, model)) is not None:
        raise BadInput(f"--drafter {drafter}: {refusal}")
    encode, groups = Prompts(str(target), engine.max_model_len).prepare_group, []
    for number in range(samples):
        prepared = encode(wanted[number % len(wanted)])
        if isinstance(prepared, Rejected):
            raise BadInput(f"{prompts}: {prepared.reason}")
        groups.append(prepared.token_ids)
    import numpy as np

    draft = engine.draft.model_copy(update={"method": "model"})
    engine = engine.model_copy(update={"model": str(target), "draft": draft})
    given = {"model": str(model), "window": window}
    drafts = file.application.args.drafter
    drafts = DrafterConfig(**given) if drafts is None else drafts.model_copy(update=given)
    tokens = [np.array(group, np.int32) for group in groups]
    result = measure(engine, drafts, tokens, max_tokens, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['samples']} samples, window {result['window']}")
    columns = ["run", "tokens_s", "predicted_tokens_s", "tokens_per_verification", "acceptance", "drafted", "accepted"]
    columns += ["rejections", "mean_wasted", "most_wasted"]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for name, run in result["runs"].items():
        table.add_row(name, *(str(run.get(column, "")) for column in columns[1:]))
    Console().print(table)
    Console().print("plan:", ", ".join(f"{key} {value}" for key, value in result["plan"].items()))
    Console().print("the same tokens in every run:", result["same_tokens"])
