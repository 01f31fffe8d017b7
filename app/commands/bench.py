"""`python -m app bench ...`: benchmarks that can be run again."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import click

from app.commands.calibrate import command as calibrate
from app.commands.control import command as control
from app.commands.decoupled import command as decoupled
from app.commands.tail import command as tail
from app.config import DEFAULT_CONFIG, load_config
from app.errors import BadInput

LEAST_LENGTH, MOST_LENGTH = 64, 8064
"""Two blocks of KV, of which one is always computed again, and what the models of `bench kvpool` can hold."""

WORDS_AND_MARKS = re.compile(r"\w+|[^\w\s]")

AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")


@click.group()
def command():
    """Benchmarks; every figure stands beside its baseline of the same run."""


command.add_command(calibrate)
command.add_command(decoupled)
command.add_command(control)
command.add_command(tail)


@command.command()
@click.option("--requests", type=click.IntRange(min=1024), default=16_384, show_default=True, help="Samples.")
@click.option("--replicas", type=click.IntRange(min=1), default=512, show_default=True)
@AS_JSON
def scheduler(requests, replicas, as_json):
    """Decisions a second of the rollout core, and how their cost grows."""
    from app.bench.scheduler import measure

    _print(measure(requests, replicas), as_json)


@command.command()
@click.option("--samples", type=click.IntRange(min=1_024), default=16_384, show_default=True)
@click.option("--replicas", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--tokens", type=click.IntRange(min=16), default=20_000, show_default=True, help="Mean of an answer.")
@click.option("--drafting", default="off", show_default=True, help="A drafting policy, as `app policies` lists them.")
@AS_JSON
def simulator(samples, replicas, tokens, drafting, as_json):
    """Seconds and memory of a large simulation, and the cost of an event there over that in a small one."""
    from policies.bundle import Policies

    try:
        Policies(drafting=drafting)
    except ValueError as error:
        raise BadInput(f"--drafting {drafting}: no such policy; `python -m app policies` lists them") from error
    from app.bench.simulator import measure

    _print(measure(samples, replicas, tokens, drafting), as_json)


@command.command()
@click.option("--workload", default="rhyme-14b-16k", show_default=True, help="A paper's set-up by name, or a file.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Draws of the workload.")
@click.option("--scale", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True,
              help="Share of replicas and prompts.")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path), default=None, help="A picture of all runs, .png or .svg.")
@AS_JSON
def pipeline(workload, steps, seeds, scale, plot, as_json):
    """Pipelines over training steps: barriers, a naive pipeline and HistoPipe's tiers, beside RhymeRL's claims."""
    if plot is not None:
        _check_picture(plot)
    from app.bench.pipeline import measure
    from app.simulator.scenario import load_scenario

    try:
        scenario = load_scenario(workload)
    except ValueError as error:
        raise BadInput(f"--workload {error}") from error
    result = measure(scenario.scaled(scale) if scale < 1 else scenario, steps, seeds, _say)
    if plot is not None:
        from app.bench.pictures import pipelines

        pipelines(plot, result)
    _print(result, as_json)


@command.command()
@AS_JSON
def sampler(as_json):
    """Milliseconds a row of the exact sampling kernels, beside plain torch."""
    from app.bench.sampler import measure

    _print(measure(), as_json)


@command.command()
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--prompts", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--samples", type=click.IntRange(min=1), default=8, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=2048, show_default=True, help="Per sample.")
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Of our run.")
@click.option("--oracle", is_flag=True, help="Also true longest first: what the best order could bring.")
@click.option("--drafts", is_flag=True, help="Instead: every draft budget, against none and vLLM's own drafters.")
@click.option("--plot", type=click.Path(path_type=Path), default=None, help="With --drafts: a picture, .png or .svg.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="The best of each counts.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@AS_JSON
def live(trace, prompts, samples, max_tokens, chunk_tokens, oracle, drafts, plot, repeats, config, as_json):
    """Replay real rollouts on two replicas: static groups against the configured policies, without drafts."""
    _check_plot(plot, drafts)
    from app.model import resolve_model
    from app.trace_file import read_trace, replay_groups

    file = load_config(config)
    lines = read_trace(trace)
    from app.bench.live import measure, runs
    from deployments.prompts import Prompts

    engine = file.application.args.engine
    encode = Prompts(str(resolve_model(engine.model)), engine.max_model_len).encode
    groups = replay_groups(lines, encode, prompts=prompts, samples=samples, max_tokens=max_tokens)
    if drafts:
        from app.bench.speculation import measure as measure_drafts

        _print(measure_drafts(file, groups, repeats, _say, plot), as_json)
        return
    named = runs(file, chunk_tokens, oracle)
    _print(measure(file, groups, named, repeats, _say), as_json)


@command.command()
@click.option("--lengths", default="256,1024,4096", show_default=True, help="Context lengths in tokens.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="The best of each counts.")
@AS_JSON
def kvpool(lengths, repeats, as_json):
    """Move a sample's KV between two engines: against staying, computing it again, memcpy and a loopback socket."""
    wanted = _lengths(lengths)
    from app.bench.kvpool import measure, tables

    result = measure(wanted, repeats, _say)
    if as_json:
        click.echo(json.dumps(result))
        return
    from rich.console import Console

    Console().print(*tables(result))


@command.command()
@click.option("--moves", type=click.IntRange(min=150), default=2000, show_default=True)
@AS_JSON
def soak(moves, as_json):
    """Move samples between two engines at every chunk end, and watch the memory of every process."""
    from app.bench.soak import measure

    _print(measure(moves, _say), as_json)


def _check_plot(plot: Path | None, drafts: bool) -> None:
    if plot is None:
        return
    if not drafts:
        raise BadInput("--plot: only with --drafts; add it, or leave --plot out")
    _check_picture(plot)


def _check_picture(plot: Path) -> None:
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--plot {plot}: give a path that ends in .png, .svg or .pdf")
    if not plot.resolve().parent.is_dir():
        raise BadInput(f"--plot {plot}: its folder does not exist")


@command.command()
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--samples", type=click.IntRange(min=9), default=16, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=4096, show_default=True, help="Per sample.")
@click.option("--tokenizer", help="A model's folder, or demo: lengths in its tokens, else in words and marks.")
@AS_JSON
def lengths(trace, samples, max_tokens, tokenizer, as_json):
    """Who has most left to make, by every length policy: the last checkpoint of a trace, with the others as history."""
    from app.trace_file import read_trace

    lines = read_trace(trace)
    from app.bench.lengths import measure, read_batches

    _print(measure(read_batches(lines, _counter(tokenizer), samples, max_tokens), max_tokens), as_json)


def _counter(tokenizer: str | None) -> Callable[[str], int]:
    """How many tokens a text has."""
    if tokenizer is None:
        return lambda text: len(WORDS_AND_MARKS.findall(text))
    from app.model import resolve_model
    from deployments.prompts import Prompts

    encode = Prompts(str(resolve_model(tokenizer)), max_model_len=0).encode
    return lambda text: len(encode(text))


@command.command()
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--tokenizer", default="demo", show_default=True, help="A model's folder, or demo.")
@click.option(
    "--ablation", is_flag=True, help="Ratios instead: each of the index's parts against the index without it."
)
@click.option("--fit", type=click.Path(path_type=Path), help="Fit the evidence's prior to the trace instead; to FILE.")
@AS_JSON
def drafts(trace, tokenizer, ablation, fit, as_json):
    """Tokens per verification that the draft index brings, beside Arctic's rule; what its service takes and gives."""
    from app.model import resolve_model
    from app.trace_file import read_trace

    lines = read_trace(trace)
    from app.bench.drafts import measure, read_rollouts
    from deployments.prompts import Prompts

    encode = Prompts(str(resolve_model(tokenizer)), max_model_len=0).encode
    if fit:
        from app.bench import drafts_fit

        drafts_fit.write(drafts_fit.fit(drafts_fit.earlier_rollouts(lines, encode), _say), fit)
        return
    rollouts = read_rollouts(lines, encode)
    if ablation:
        from app.bench.drafts_ablation import measure as measure_ablation

        _print(measure_ablation(rollouts, _say), as_json)
        return
    result = measure(rollouts, _say)
    from app.bench.context import measure as measure_context

    _print(result | measure_context([mate for prompt in rollouts for mate in prompt.mates]), as_json)


@command.command()
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--tokenizer", default="demo", show_default=True, help="A model's folder, or demo.")
@click.option("--prompts", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--running", type=click.IntRange(min=1), default=16, show_default=True, help="Most samples at once.")
@click.option("--profile", type=click.Path(path_type=Path), default=None, help="A file of `app profile --out`.")
@AS_JSON
def budgets(trace, tokenizer, prompts, running, profile, as_json):
    """Every draft budget on one modelled replica: its own drafting code over recorded rollouts, no engine, no noise."""
    from app.model import resolve_model
    from app.trace_file import read_trace

    lines = read_trace(trace)[:prompts]
    from app.bench.budgets import CPU, cost_of, measure
    from app.bench.drafts import read_rollouts
    from deployments.prompts import Prompts

    cost = CPU if profile is None else cost_of(profile)
    encode = Prompts(str(resolve_model(tokenizer)), max_model_len=0).encode
    _print(measure(read_rollouts(lines, encode), cost, running, _say), as_json)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < LEAST_LENGTH or lengths[-1] > MOST_LENGTH:
        raise BadInput(f"--lengths {text}: give numbers from {LEAST_LENGTH} to {MOST_LENGTH} with commas between")
    return tuple(lengths)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _print(result: dict, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result))
        return
    for key, value in result.items():
        if not isinstance(value, dict):
            click.echo(f"{key:24} {value}")
            continue
        for name, inner in value.items():
            click.echo(f"{key:24} {name}: {json.dumps(inner)}")
