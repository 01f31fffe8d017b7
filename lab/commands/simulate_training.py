"""`tailrace simulate-training`: whole steps of rollout, rewards, training and weights over a modelled cluster."""

import json
import time
from functools import partial

import click

from tailrace.app.errors import BadInput

DEFAULT_MODES = "verl_no_old_pass,verl_apart,sync,overlap,one_step_off,finish,bounded,histopipe"


@click.command()
@click.option("--workload", default="das-7b-16k", show_default=True, help="A paper's set-up by name, or a file.")
@click.option("--train", "modes", default=DEFAULT_MODES, show_default=True, help="Modes; verl is always the baseline.")
@click.option("--steps", type=click.IntRange(min=1), default=8, show_default=True, help="Training steps.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Draws of the workload.")
@click.option("--scale", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True,
              help="Share of replicas and prompts.")  # fmt: skip
@click.option("--max-staleness", type=click.IntRange(min=1), default=2, show_default=True, help="Of bounded: updates.")
@click.option("--kv-on-update", type=click.Choice(["fresh", "keep"]), default="fresh", show_default=True,
              help="KV of samples that continue through an update.")  # fmt: skip
@click.option("--train-share", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=None,
              help="Of the GPUs, where training has its own.  [default: 0.5]")  # fmt: skip
@click.option("--ranking-groups", type=click.IntRange(min=1), default=None,
              help="Of histopipe, up to half of its replicas.  [default: 16]")  # fmt: skip
@click.option("--check", is_flag=True, help="Verify the laws at every event.")
@click.option("--list", "listing", is_flag=True, help="List the modes, and the assumptions.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(
    workload, modes, steps, seeds, scale, max_staleness, kv_on_update, train_share, ranking_groups, check, listing,
    as_json,
):  # fmt: skip
    """Train for some steps on a modelled cluster, in several modes, on the same number of GPUs.

    Ratios are verl's seconds of a whole step over the mode's, seed by seed: [mean, min, max]. verl has static groups,
    no drafts, and all GPUs roll out and train by turns. The first two steps are not counted.
    """
    from tailrace.lab.simulated_training.figures import TrainingFigures
    from tailrace.lab.simulated_training.modes import BASELINE, MODES, mode
    from tailrace.lab.simulated_training.report import training_summary
    from tailrace.lab.simulated_training.run import gpus_of, train_run
    from tailrace.lab.simulator.scenario import Known, load_scenario

    figures = TrainingFigures()
    given = {"train_share": train_share, "ranking_groups": ranking_groups}
    given = {key: Known(value=value, assumed="given") for key, value in given.items() if value is not None}
    figures = figures.model_copy(update=given)
    if max_staleness >= (epoch_steps := figures.epoch_steps.value):
        most = f"give {epoch_steps - 1} at most: a prompt has ended before it comes again, {epoch_steps} steps later"
        raise BadInput(f"--max-staleness {max_staleness}: {most}")
    try:
        scenario = load_scenario(workload).whole()
    except ValueError as error:
        raise BadInput(f"--workload {error}") from error
    if listing:
        _list(MODES, [*figures.notes(), *scenario.notes()], as_json)
        return
    scenario = scenario.scaled(scale) if scale < 1 else scenario
    try:
        names = [name.strip() for name in modes.split(",") if name.strip()]
        chosen = {name: mode(name, max_staleness) for name in dict.fromkeys([BASELINE, *names])}
    except ValueError as error:
        raise BadInput(f"--train: {error}") from error
    try:
        for each in chosen.values():
            gpus_of(scenario, each, figures)
    except ValueError as error:
        raise BadInput(f"--workload {error}") from error
    runs = {name: [] for name in chosen}
    for seed in range(seeds):
        for name, each in chosen.items():
            began_s = time.monotonic()
            how = {"check": check, "kv_on_update": kv_on_update}
            found = _shown(partial(train_run, scenario, each, seed, steps, figures, **how), f"{name}, seed {seed}")
            runs[name].append(found)
            took_s = time.monotonic() - began_s
            click.echo(f"{name}, seed {seed}: {found['step_s']:.1f} s a step, simulated in {took_s:.1f} s", err=True)
    result = {"workload": scenario.name, "baseline": BASELINE, "gpus": scenario.gpus.value, "steps": steps}
    result |= {"seeds": list(range(seeds)), "modes": training_summary(runs)}
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def _shown(run, title: str) -> dict:
    """Returns the run's figures; shows a bar of ended samples on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None)
        return run(progress=lambda ended, samples: bar.update(task, completed=ended, total=samples))


def _list(modes, notes, as_json: bool) -> None:
    rows = [dict(zip(("key", "value", "kind", "why"), note, strict=True)) for note in notes]
    if as_json:
        click.echo(json.dumps({"modes": {name: each.about for name, each in modes.items()}, "figures": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    known, figures = Table("mode", "about"), Table("figure", "value", "from")
    for name, each in modes.items():
        known.add_row(name, each.about)
    for row in rows:
        figures.add_row(row["key"], str(row["value"]), f"{row['kind']}: {row['why']}")
    Console().print(known, figures)


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    from tailrace.lab.simulated_training.report import HEADS, training_rows

    title = f"{result['workload']}, {result['gpus']} GPUs: {result['steps']} steps, {len(result['seeds'])} seed(s)"
    table = Table(*HEADS, title=title)
    for row in training_rows(result["modes"]):
        table.add_row(*row)
    Console().print(table)
