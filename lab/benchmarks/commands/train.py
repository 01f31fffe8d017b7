"""`tailrace bench train`: seconds of a whole training step, by mode, over the same tokens."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput
from tailrace.lab.benchmarks.commands.output import AS_JSON, say


@click.command("train")
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--groups", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts of a step.")
@click.option("--samples", type=click.IntRange(min=2), default=4, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=2048, show_default=True, help="Per sample.")
@click.option("--shorten", type=click.IntRange(min=1), default=1, show_default=True,
              help="Replay the first of so many equal parts of each answer; the shape of the tail stays.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="That count, of each mode.")
@click.option("--modes", "only", multiple=True, metavar="NAME", help="Only these, all by default; may be given again.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@AS_JSON
def command(trace, groups, samples, max_tokens, shorten, steps, only, config, as_json):
    """Train on recorded answers: static groups with a trainer that waits, TRL's own generation, and the learner's
    modes.

    Trainer and engines share the cores. About an hour for all modes on two cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tailrace.app.files.traces import read_trace
    from tailrace.lab.benchmarks.live.train import MAX_STALENESS, NAMES, TrainingReplay, measure

    file = load_config(config)
    unknown = next((name for name in only if name not in NAMES), None)
    if unknown is not None:
        raise BadInput(f"--modes {unknown}: no mode is called so; known: {', '.join(NAMES)}")
    lines = read_trace(trace)
    every = steps + 1 + MAX_STALENESS  # one step warms up, and modes that are ahead begin MAX_STALENESS more
    wanted = groups * every
    if len(lines) < wanted:
        raise BadInput(f"{trace}: {len(lines)} prompts; {wanted} are needed, {groups} for each of {every} steps")
    with tempfile.TemporaryDirectory(prefix="tailrace-prompts-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        answers = _answers(file, lines[:wanted], samples, max_tokens, shorten)
        prompts.write_text("".join(_questions(file, lines[:wanted], answers.values())))
        sizes = {"groups": groups, "samples": samples, "max_tokens": max_tokens, "steps": steps}
        result = measure(file, TrainingReplay(prompts, answers, **sizes), only or NAMES, say)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def _answers(file, lines, samples: int, max_tokens: int, shorten: int) -> dict:
    """Returns the recorded answers by the tokens of their prompt, which is tokenized as bare text, as a trainer does.
    Raises BadInput if a prompt has too few answers.
    """
    from tailrace.app.files.traces import replay_groups
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts

    engine = file.application.args.engine
    encode = Prompts(str(resolve_model(engine.model)), engine.max_model_len).encode
    whole = replay_groups(lines, encode, prompts=len(lines), samples=samples, max_tokens=1 << 20)
    short = next((group.prompt_id for group in whole if group.samples < samples), None)
    if short is not None:
        raise BadInput(f"--samples {samples}: prompt {short!r} of the trace has fewer")
    return {
        group.token_ids: tuple(
            tuple(ids[: min(len(ids) // shorten + 1, max_tokens - 1)]) for ids in group.forced_token_ids
        )
        for group in whole
    }


def _questions(file, lines, answers) -> Iterator[str]:
    """Yields the lines of the task, each with the recorded rewards of its answers."""
    from transformers import AutoTokenizer

    from tailrace.app.model import resolve_model
    from tailrace.lab.benchmarks.live.recorded_rewards import key_of

    tokenizer = AutoTokenizer.from_pretrained(str(resolve_model(file.application.args.engine.model)))
    for line, ids in zip(lines, answers, strict=True):
        texts = [tokenizer.decode(each, skip_special_tokens=True) for each in ids]
        rewards = [sample["reward"] for sample in line["epochs"][-1]["samples"]]
        yield json.dumps({"prompt": line["prompt"], "answer": key_of(zip(texts, rewards, strict=False))}) + "\n"


def _print(result: dict) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title="a whole step of training", box=SIMPLE, padding=0)
    for column in ("mode", "seconds", "to static", "idle share", "of the bound"):
        table.add_column(column, justify="right")
    for name, figures in result["modes"].items():
        shares = (figures.get(key) for key in ("ratio", "idle_share", "bound_share"))
        table.add_row(name, f"{figures['step_s']:.1f}", *("" if share is None else f"{share:.2f}" for share in shares))
    Console().print(table)
