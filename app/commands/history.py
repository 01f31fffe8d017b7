"""`tailrace history ...`: answers of earlier epochs, from which later ones draft: import, list, forget."""

import json
import sqlite3
from contextlib import contextmanager
from pathlib import Path

import click

from tailrace.app.errors import BadInput, Failed
from tailrace.deployments.context.archive import Archive
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.prompt_files import EVERY

BOUNDS = ContextConfig()
LARGEST = 2**63 - 1
"""Maximum integer of a database."""

AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
HISTORY_DIR = click.option(
    "--history-dir", type=click.Path(path_type=Path), required=True, help="args.context.history_dir of the service."
)


@click.group()
def command():
    """Import, list and forget answers of earlier epochs, from which later ones draft."""


@command.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@HISTORY_DIR
@click.option("--tokenizer", default="demo", show_default=True, help="The model's folder, or demo.")
@click.option("--epoch", type=click.IntRange(0, LARGEST), help="Epoch of all answers; default: the files' steps, or 0.")
@click.option(
    "--weights-version",
    type=click.IntRange(0, LARGEST),
    default=0,
    show_default=True,
    help="Where no file names one.",
)
@click.option("--epochs", "most_epochs", type=click.IntRange(min=1), default=BOUNDS.history_epochs, show_default=True,
              help="Newest epochs to keep of each prompt.")  # fmt: skip
@click.option("--mib", "most_mib", type=click.FloatRange(min=0, min_open=True), default=BOUNDS.history_mib,
              show_default=True, help="Max bytes to keep, packed.")  # fmt: skip
@AS_JSON
def import_(files, history_dir, tokenizer, epoch, weights_version, most_epochs, most_mib, as_json):
    """Import rollouts dumped by verl, TRL (as JSONL) or `rollout --out`, and traces. Repeats change nothing."""
    for path in files:
        if not path.is_file():
            raise BadInput(f"{path}: no such file")
    archive = _archive(history_dir, history_epochs=most_epochs, history_mib=most_mib)
    from tailrace.app.files.history_import import HistoryImport
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts

    folder = resolve_model(tokenizer)
    work = HistoryImport(archive, Prompts(str(folder), max_model_len=0), epoch, weights_version)
    with _failures(), _bar(files) as seen:
        for path in files:
            work.add(path, seen)
    _print(work.summary(), as_json)


@command.command("list")
@HISTORY_DIR
@AS_JSON
def list_(history_dir, as_json):
    """List prompts, answers, tokens, bytes and epochs."""
    with _failures():
        totals = [file.totals() for file in _archive(history_dir).files()]
    kept = [each for each in totals if each.answers]
    summed = ("prompts", "answers", "tokens", "packed_bytes")
    result = {name: sum(getattr(each, name) for each in kept) for name in summed} | {
        "oldest_epoch": min((each.oldest_epoch for each in kept), default=None),
        "newest_epoch": max((each.newest_epoch for each in kept), default=None),
    }
    _print(result, as_json)


@command.command()
@click.argument("prompt", required=False)
@HISTORY_DIR
@click.option("--all", "every", is_flag=True, help="All prompts, for a new run whose epochs begin at 0.")
@AS_JSON
def forget(prompt, history_dir, every, as_json):
    """Forget a prompt (its prompt id, prompt key or a group id), or --all."""
    if every == (prompt is not None):
        raise BadInput("give a prompt or --all")
    archive = _archive(history_dir)
    with _failures():
        if every:
            gone = sum(file.forget() for file in archive.files())
        else:
            found = archive.find(prompt)
            if found is None:
                raise BadInput(f"{history_dir}: knows no prompt {prompt!r}")
            gone = archive.of(found[0]).forget(found[0])
    _print({"forgotten_answers": gone}, as_json)


def _archive(history_dir: Path, **bounds) -> Archive:
    """Returns the history in this folder. Raises BadInput if a file there cannot be used."""
    if history_dir.exists() and not history_dir.is_dir():
        raise BadInput(f"--history-dir {history_dir}: is a file, and a folder is needed")
    archive = Archive(ContextConfig(history_dir=str(history_dir.absolute()), **bounds), EVERY)
    list(archive.files())
    if archive.problem:
        raise BadInput(archive.problem)
    return archive


@contextmanager
def _failures():
    """Turns errors of the files into one line: a full disk, or another process that writes for too long."""
    try:
        yield
    except sqlite3.Error as error:
        raise Failed(f"history: {error}") from error


@contextmanager
def _bar(files):
    """Yields a callback for the number of bytes read of the present file."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    done_bytes = last_bytes = 0
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=sum(path.stat().st_size for path in files))

        def seen(read_bytes: int) -> None:
            nonlocal done_bytes, last_bytes
            if read_bytes < last_bytes:  # the next file
                done_bytes += last_bytes
            last_bytes = read_bytes
            bar.update(task, completed=done_bytes + read_bytes)

        yield seen


def _print(result: dict, as_json: bool) -> None:
    click.echo(json.dumps(result) if as_json else "\n".join(f"{key:20} {value}" for key, value in result.items()))
