"""`tailrace bench ...`: the group of all benchmarks, and its short commands."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput, did_you_mean
from tailrace.app.files.output_file import OutputFile, OutputKind, check_apart
from tailrace.lab.benchmarks.commands.agents import command as agents
from tailrace.lab.benchmarks.commands.calibrate import command as calibrate
from tailrace.lab.benchmarks.commands.control import command as control
from tailrace.lab.benchmarks.commands.decoupled import command as decoupled
from tailrace.lab.benchmarks.commands.fleet import command as fleet
from tailrace.lab.benchmarks.commands.http import command as http
from tailrace.lab.benchmarks.commands.ladder import command as ladder
from tailrace.lab.benchmarks.commands.observability import command as observability
from tailrace.lab.benchmarks.commands.output import AS_JSON, picture_file, print_result, say
from tailrace.lab.benchmarks.commands.overhead import command as overhead
from tailrace.lab.benchmarks.commands.pipeline import command as pipeline
from tailrace.lab.benchmarks.commands.processes import command as processes
from tailrace.lab.benchmarks.commands.ranks import command as ranks
from tailrace.lab.benchmarks.commands.results import command as results
from tailrace.lab.benchmarks.commands.specactor import command as specactor
from tailrace.lab.benchmarks.commands.tail import command as tail
from tailrace.lab.benchmarks.commands.train import command as train
from tailrace.lab.benchmarks.commands.turns import command as turns
from tailrace.lab.benchmarks.commands.weights import command as weights
from tailrace.lab.benchmarks.commands.windows import command as windows

PRIOR = OutputKind("a file of `bench drafts --fit`", (b'{"mean": ',), (b'"inner": ',))

LEAST_LENGTH, MOST_LENGTH = 64, 8064
"""Minimum and maximum context length in tokens: two blocks of KV, one of which is always computed again, and what the
models of `bench kvpool` can hold.
"""

WORDS_AND_MARKS = re.compile(r"\w+|[^\w\s]")


class Benches(click.Group):
    """A click group that answers a wrong name with the nearest ones."""

    def resolve_command(self, ctx, args):
        if args and args[0] not in self.commands:
            raise did_you_mean(args[0], self.commands, ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Benches)
def command():
    """Benchmarks. Every figure comes with its baseline, measured in the same run."""


command.add_command(agents)
command.add_command(calibrate)
command.add_command(decoupled)
command.add_command(control)
command.add_command(fleet)
command.add_command(http)
command.add_command(ladder, "ladder")
command.add_command(observability)
command.add_command(overhead)
command.add_command(pipeline, "pipeline")
command.add_command(processes)
command.add_command(ranks)
command.add_command(results)
command.add_command(specactor, "specactor")
command.add_command(tail)
command.add_command(weights)
command.add_command(train)
command.add_command(turns)
command.add_command(windows)


@command.command()
@click.option("--requests", type=click.IntRange(min=1024), default=16_384, show_default=True, help="Samples.")
@click.option("--replicas", type=click.IntRange(min=1), default=512, show_default=True)
@AS_JSON
def scheduler(requests, replicas, as_json):
    """Measure the decisions a second of the rollout core, and how the cost of a decision grows."""
    from tailrace.lab.benchmarks.control_plane.scheduler import measure

    print_result(measure(requests, replicas), as_json)


@command.command()
@click.option("--samples", type=click.IntRange(min=1_024), default=16_384, show_default=True)
@click.option("--replicas", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--tokens", type=click.IntRange(min=16), default=20_000, show_default=True, help="Mean of an answer.")
@click.option(
    "--drafting", default="off", show_default=True, help="A drafting policy, as `tailrace policies` lists them."
)
@AS_JSON
def simulator(samples, replicas, tokens, drafting, as_json):
    """Measure seconds and memory of a large simulation, and the cost of its events relative to a small one."""
    from tailrace.policies.families.registry import Policies

    try:
        Policies(drafting=drafting)
    except ValueError as error:
        raise BadInput(f"--drafting {drafting}: no such policy; `tailrace policies` lists them") from error
    from tailrace.lab.benchmarks.control_plane.simulator import measure

    print_result(measure(samples, replicas, tokens, drafting), as_json)


@command.command()
@click.option("--triton", is_flag=True, help="Instead: the GPU's kernel, interpreted, against the CPU's; bytes a row.")
@click.option(
    "--rows", type=click.IntRange(min=1), default=20_000, show_default=True, help="With --triton: rows drawn."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="With --triton: of the rows.")
@AS_JSON
def sampler(triton, rows, seed, as_json):
    """Measure milliseconds a row of the exact sampling kernel, beside plain torch."""
    if triton:
        from tailrace.lab.benchmarks.engine.sampler_triton import measure as compare

        print_result(compare(rows, seed, say), as_json)
        return
    from tailrace.lab.benchmarks.engine.sampler import measure

    print_result(measure(), as_json)


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
    """Replay real rollouts on two replicas: static groups against chunks in Seer's order, both without drafts."""
    picture = _picture(plot, drafts)
    from tailrace.app.files.traces import read_trace, replay_groups
    from tailrace.app.model import resolve_model

    file = load_config(config)
    lines = read_trace(trace)
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.lab.benchmarks.live.static_baseline import measure, runs

    engine = file.application.args.engine
    encode = Prompts(str(resolve_model(engine.model)), engine.max_model_len).encode
    groups = replay_groups(lines, encode, prompts=prompts, samples=samples, max_tokens=max_tokens)
    if drafts:
        from tailrace.lab.benchmarks.live.speculation import measure as measure_drafts

        print_result(measure_drafts(file, groups, repeats, say, picture), as_json)
        return
    named = runs(file, chunk_tokens, oracle)
    print_result(measure(file, groups, named, repeats, say), as_json)


@command.command()
@click.option("--lengths", default="256,1024,4096", show_default=True, help="Context lengths in tokens.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="The best of each counts.")
@AS_JSON
def kvpool(lengths, repeats, as_json):
    """Move a sample's KV between two engines, and compare with staying, recomputing, memcpy and a loopback socket."""
    wanted = _lengths(lengths)
    from tailrace.lab.benchmarks.pool.kvpool import measure, tables

    result = measure(wanted, repeats, say)
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
    from tailrace.lab.benchmarks.pool.soak import measure

    print_result(measure(moves, say), as_json)


def _picture(plot: Path | None, drafts: bool) -> OutputFile | None:
    if plot is not None and not drafts:
        raise BadInput("--plot: only with --drafts; add it, or leave --plot out")
    return picture_file(plot)


@command.command()
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--samples", type=click.IntRange(min=9), default=16, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=4096, show_default=True, help="Per sample.")
@click.option("--tokenizer", help="A model's folder, or demo: lengths in its tokens, else in words and marks.")
@AS_JSON
def lengths(trace, samples, max_tokens, tokenizer, as_json):
    """Measure how well each length policy predicts which samples have most tokens left.

    The last checkpoint of a trace is replayed. The earlier ones are its history.
    """
    from tailrace.app.files.traces import read_trace

    lines = read_trace(trace)
    from tailrace.lab.benchmarks.drafting.lengths import measure, read_batches

    print_result(measure(read_batches(lines, _counter(tokenizer), samples, max_tokens), max_tokens), as_json)


def _counter(tokenizer: str | None) -> Callable[[str], int]:
    """Returns a function that counts the tokens of a text; without a tokenizer, its words and marks."""
    if tokenizer is None:
        return lambda text: len(WORDS_AND_MARKS.findall(text))
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts

    encode = Prompts(str(resolve_model(tokenizer)), max_model_len=0).encode
    return lambda text: len(encode(text))


@command.command()
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--tokenizer", default="demo", show_default=True, help="A model's folder, or demo.")
@click.option(
    "--ablation", is_flag=True, help="Ratios instead: each of the index's parts against the index without it."
)
@click.option("--fit", type=click.Path(path_type=Path), help="Fit the evidence's prior to the trace instead; to FILE.")
@click.option("--prior", type=click.Path(exists=True, path_type=Path), help="Begin with this file of --fit.")
@AS_JSON
def drafts(trace, tokenizer, ablation, fit, prior, as_json):
    """Measure tokens per verification with the draft index, beside Arctic's rule, and the group context's speed."""
    from tailrace.app.files.traces import read_trace
    from tailrace.app.model import resolve_model

    check_apart({"--fit": fit}, {"--trace": trace, "--prior": prior})
    fit = OutputFile.of(fit, "--fit", PRIOR)
    lines = read_trace(trace)
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.lab.benchmarks.drafting.drafts import measure, read_rollouts

    encode = Prompts(str(resolve_model(tokenizer)), max_model_len=0).encode
    if fit:
        from tailrace.lab.benchmarks.drafting import drafts_fit

        drafts_fit.write(drafts_fit.fit(drafts_fit.earlier_rollouts(lines, encode), say), fit)
        return
    rollouts = read_rollouts(lines, encode)
    if ablation:
        from tailrace.lab.benchmarks.drafting.drafts_ablation import measure as measure_ablation

        print_result(measure_ablation(rollouts, say), as_json)
        return
    result = measure(rollouts, say, prior)
    from tailrace.lab.benchmarks.control_plane.context import measure as measure_context

    print_result(result | measure_context([mate for prompt in rollouts for mate in prompt.mates]), as_json)


@command.command()
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--tokenizer", default="demo", show_default=True, help="A model's folder, or demo.")
@click.option("--prompts", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--running", type=click.IntRange(min=1), default=16, show_default=True, help="Most samples at once.")
@click.option("--profile", type=click.Path(path_type=Path), default=None, help="A file of `tailrace profile --out`.")
@AS_JSON
def budgets(trace, tokenizer, prompts, running, profile, as_json):
    """Compare draft budgets on one modelled replica: the engine's own drafting code over recorded rollouts, without
    noise.
    """
    from tailrace.app.files.traces import read_trace
    from tailrace.app.model import resolve_model

    lines = read_trace(trace)[:prompts]
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.lab.benchmarks.drafting.budgets import CPU, cost_of, measure
    from tailrace.lab.benchmarks.drafting.drafts import read_rollouts

    cost = CPU if profile is None else cost_of(profile)
    encode = Prompts(str(resolve_model(tokenizer)), max_model_len=0).encode
    print_result(measure(read_rollouts(lines, encode), cost, running, say), as_json)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < LEAST_LENGTH or lengths[-1] > MOST_LENGTH:
        raise BadInput(f"--lengths {text}: give numbers from {LEAST_LENGTH} to {MOST_LENGTH} with commas between")
    return tuple(lengths)
