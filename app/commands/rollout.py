"""`tailrace rollout`: reads prompts from a file, writes grouped samples. A second run makes only the missing groups."""

import asyncio
import contextlib
import json
import time
import uuid
from pathlib import Path

import click

from tailrace.app.allow_code import allow_code_option
from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput, Failed
from tailrace.app.files.otlp_json import SPANS, traces_data
from tailrace.app.files.output_file import OutputFile, OutputKind, check_apart
from tailrace.app.files.prompts import read_prompts
from tailrace.app.files.results import ResultsFile
from tailrace.app.summary import summarise, table
from tailrace.policies.protocol.actions import SampleEnd

JOURNAL = OutputKind("a journal of `rollout --journal`", (b'{"journal": ',))


@click.command()
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="JSONL, one prompt a line.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSONL, one finished group a line.")
@click.option("--samples", type=click.IntRange(min=1), default=8, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Per sample.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0: off.")
@click.option("--min-p", type=click.FloatRange(min=0, max=1), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the run, in every key.")
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, help="RL step, in every sample key.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@allow_code_option
@click.option("--address", default=None, help="A running cluster (auto, host:port); else a local one is made.")
@click.option("--trace", type=click.Path(path_type=Path), default=None, help="Write the run's spans there, OTLP JSON.")
@click.option("--journal", type=click.Path(path_type=Path), default=None, help="Write the core's events and actions.")
@click.option("--json", "as_json", is_flag=True, help="The summary as one JSON object, the last line of stdout.")
def command(prompts, out, samples, max_tokens, config, address, trace, journal, as_json, seed, step, **sampling):
    """Roll out every prompt of a file; finished groups are appended to OUT as they come."""
    check_apart({"--out": out, "--trace": trace, "--journal": journal}, {"--prompts": prompts, "--config": config})
    file = load_config(config)
    defaults = {"samples": samples, "max_tokens": max_tokens, "sampling": sampling}
    wanted = read_prompts(prompts, defaults)
    trace = OutputFile.of(trace, "--trace", SPANS)
    journal = OutputFile.of(journal, "--journal", JOURNAL)
    results = ResultsFile(out)
    missing = results.missing(wanted, seed, step)
    groups, arrived_s, spans = [], [], []
    if missing:
        if len(missing) < len(wanted):
            click.echo(f"{len(wanted) - len(missing)} of {len(wanted)} groups are in {out} already", err=True)
        groups, arrived_s, spans = _run(file, address, missing, results, seed, step, trace is not None, journal)
    if trace is not None:
        trace.write(json.dumps(traces_data(spans)) + "\n")
    _report(groups, arrived_s, len(wanted) - len(missing), out, as_json)


def _run(file, address, prompts, results, seed, step, keep_trace, journal):
    """Rolls out `prompts`. Returns the groups, the seconds to the arrival of each, and the spans of the run if they are
    recorded.
    """
    from tailrace.app.calls.refused import RolloutRejected
    from tailrace.app.cluster import service
    from tailrace.deployments.messages.rollout import RolloutBatch

    batch = RolloutBatch(
        batch_id=f"rollout-{uuid.uuid4().hex[:8]}", groups=prompts, seed=seed, step=step, keep_trace=keep_trace
    )
    _check_lengths(file, batch, address)
    click.echo("starting the service" if address is None else f"connecting to {address}", err=True)
    try:
        with service(file, address) as client:
            return asyncio.run(_drive(client, batch, results, journal))
    except RolloutRejected as error:
        raise BadInput(str(error)) from error
    except KeyboardInterrupt as error:
        done = f"{len(results.done)} groups are in {results.path}"
        raise Failed(f"interrupted; {done}, run again for the rest") from error


def _check_lengths(file, batch, address) -> None:
    """Rejects prompts that the model cannot take, before a cluster is started for them."""
    if address is not None:
        return
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.deployments.messages.rollout import Rejected

    engine = file.application.args.engine
    prepared = Prompts(str(resolve_model(engine.model)), engine.max_model_len).prepare(batch)
    if isinstance(prepared, Rejected):
        raise BadInput(prepared.reason)


async def _drive(client, batch, results, journal: OutputFile | None):
    from tailrace.app.progress import RolloutProgress

    if journal is not None:
        await client.journal(True)
    prompts = {prompt.prompt_id: prompt for prompt in batch.groups}
    progress = RolloutProgress(client, batch.batch_id, sum(prompt.samples for prompt in batch.groups))
    follower = asyncio.create_task(progress.follow())
    groups, arrived_s = [], []
    try:
        results.check_weights((await client.status()).weights_digest)
        began_s = time.monotonic()
        async for group in client.rollout(batch):
            groups.append(group)
            arrived_s.append(time.monotonic() - began_s)
            if not any(map(_unfinished, group.samples)):
                results.append(group, prompts[group.prompt_id], batch.seed, batch.step)
    finally:
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower
    if journal is not None:
        written = await client.journal(False)
        journal.write(written or "")
        if written is None:
            click.echo("--journal: other batches were in flight all the time; nothing was written down", err=True)
    spans = await client.take_trace(batch.batch_id) if batch.keep_trace else []
    return groups, arrived_s, spans


def _unfinished(sample) -> bool:
    """Returns whether a sample failed, or its batch was cancelled from elsewhere: its group is still to do."""
    return sample.finish_reason not in (SampleEnd.STOP, SampleEnd.LENGTH)


def _report(groups, arrived_s, already, out, as_json) -> None:
    failed = [(g, s) for g in groups for s in g.samples if _unfinished(s)]
    summary = summarise(groups, arrived_s)
    summary |= {"already_done_groups": already, "failed_samples": len(failed), "out": str(out)}
    if as_json:
        click.echo(json.dumps(summary))
    else:
        from rich.console import Console

        Console().print(table(summary))
    if failed:
        group, sample = failed[0]
        raise Failed(
            f"{len(failed)} samples failed; the first: prompt {group.prompt_id!r} sample {sample.sample_index}: "
            f"{sample.error or sample.finish_reason}. Their groups are not in {out}; run again to try them once more"
        )
