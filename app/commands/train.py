"""`tailrace train`: GRPO on a task, with samples of the service. A second start continues from the last checkpoint."""

import json
import os
from pathlib import Path

import click

from tailrace.app.allow_code import allow_code_option
from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import Failed


@click.command()
@click.argument("train_yaml", type=click.Path(path_type=Path), metavar="TRAIN.YAML")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the run: ledger, checkpoints.")
@click.option("--steps", type=click.IntRange(min=1), default=None, help="In place of the file's number.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@allow_code_option
@click.option("--address", default=None, help="A running cluster (auto, host:port); else a local one is made.")
@click.option("--plot", is_flag=True, help="Draw reward, loss and seconds of each step into OUT/curve.png.")
@click.option("--json", "as_json", is_flag=True, help="The result as one JSON object, the last line of stdout.")
def command(train_yaml, out, steps, config, address, plot, as_json):
    """Train a model by reinforcement learning (GRPO, by TRL) on a task whose answers can be checked.

    TRAIN.YAML names model, task and sizes; docs/train.md has one. Without --address the engines of a local service get
    the model of TRAIN.YAML. Ctrl-C loses nothing that is in the folder.
    """
    from tailrace.app.train.possible_answers import check_rewards
    from tailrace.app.train.record.run_folder import RunFolder
    from tailrace.app.train.task import read_task
    from tailrace.app.train.train_config import read_train_config
    from tailrace.app.trl.weights_folders import WeightsFolders

    settings = read_train_config(train_yaml)
    if steps is not None:
        settings = settings.model_copy(update={"steps": steps})
    task, file = read_task(settings.task), load_config(config)
    if warning := check_rewards(settings.task, task):
        click.echo(warning, err=True)
    if settings.weights_dir is not None:
        WeightsFolders(settings.weights_dir)
    if settings.trainer.shares_cores:  # threads of torch that wait must not keep a core from the others
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    folder = RunFolder(out, settings, plot)
    try:
        result = _run(settings, task, folder, file, address)
    except KeyboardInterrupt as error:
        raise Failed(f"interrupted; run again with --out {out} to continue") from error
    if plot:
        from tailrace.app.train.record.picture import draw

        draw(result.rows, result.accuracies, folder.picture)
    _report(result, folder, as_json)


def _run(settings, task, folder, file, address):
    from tailrace.app.cluster import service
    from tailrace.app.config import with_engine

    with service(with_engine(file, {"model": settings.model}), address) as client:
        from tailrace.app.train.run import train  # it loads torch and TRL, which come after the connection to Ray

        return train(client, settings, task, folder, lambda text: click.echo(text, err=True))


def _report(result, folder, as_json) -> None:
    from tailrace.app.train.record.accuracy import described

    seconds = [row.seconds.step for row in result.rows]
    summary = {
        "steps": len(result.rows),
        "minutes": sum(seconds) / 60,
        "tokens": sum(row.tokens for row in result.rows),
        "held_out": [each.model_dump() for each in result.accuracies],
        "out": str(folder.path),
    }
    if as_json:
        click.echo(json.dumps(summary))
        return
    click.echo(
        f"{summary['steps']} steps in {summary['minutes']:.1f} minutes, {summary['tokens']} tokens; {folder.path}"
    )
    if result.accuracies:
        first, last = result.accuracies[0], result.accuracies[-1]
        click.echo(f"held-out accuracy before: {described(first)}; after: {described(last)}")
