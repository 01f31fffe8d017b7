"""`python -m app simulate`: the policies of a configuration, and the papers' systems, over a modelled cluster."""

import json
from functools import partial
from pathlib import Path

import click

from app.config import DEFAULT_CONFIG, load_config
from app.errors import BadInput

CONFIGURED = "config"
"""The name of the system whose policies the configuration names."""

SHOWN = ("system", "throughput", "tail", "makespan s", "tail s", "of bound")
"""Columns of the table: what fits a terminal. All figures are in the JSON and on the page."""


@click.command()
@click.option("--workload", default="moonlight", show_default=True, help="A paper's set-up by name, or a file.")
@click.option("--compare", default=f"verl,{CONFIGURED}", show_default=True, help="Systems; the first is the baseline.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Draws of the workload.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Training steps.")
@click.option("--scale", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True,
              help="Share of replicas and prompts.")  # fmt: skip
@click.option("--check", is_flag=True, help="Verify the laws at every event.")
@click.option("--report", type=click.Path(path_type=Path), default=None, help="Also write one HTML page, of seed 0.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Also write the JSON to this file.")
@click.option("--list", "listing", is_flag=True, help="What there is to choose from, and what a workload assumes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(workload, compare, config, seeds, steps, scale, check, report, out, listing, as_json):
    """Roll out a paper's workload by several systems on a modelled cluster, with the live decision code.

    Ratios are to the first system, seed by seed: [mean, least, greatest]. `config` is the policies of --config.
    """
    from app.simulator.report import ratios

    scenario = _scenario(workload)
    if listing:
        _list(scenario, as_json)
        return
    for path in (report, out):
        if path is not None and not path.resolve().parent.is_dir():
            raise BadInput(f"{path}: its folder does not exist")
    systems = _systems(compare, config)
    _check_methods(scenario, systems)
    scenario = scenario.scaled(scale) if scale < 1 else scenario
    summaries, pages = _run(scenario, systems, seeds, steps, check, report is not None)
    result = ratios(summaries, next(iter(systems)))
    result |= {"claims": {key: list(claim.value) for key, claim in scenario.claims.items()}}
    if out is not None:
        out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if report is not None:
        report.write_text(_page(scenario, pages, result), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def _scenario(workload: str):
    from app.simulator.scenario import load_scenario

    try:
        return load_scenario(workload)
    except ValueError as error:
        raise BadInput(f"--workload {error}") from error


def _systems(compare: str, config: Path) -> dict:
    from app.simulator import specactor
    from app.simulator.systems import System, system

    names = list(dict.fromkeys(name.strip() for name in compare.split(",") if name.strip()))
    if not names:
        raise BadInput("--compare: name at least one system; `simulate --list` shows them")
    found = {}
    for name in names:
        if name == CONFIGURED:
            policies = load_config(config).application.of("Coordinator").user_config.policies.model_dump()
            del policies["chunking"]  # sized for this machine's models; the workload has its own
            found[name] = System(f"the policies of {config.name}", policies)
            continue
        if name in specactor.SYSTEMS:
            found[name] = specactor.SYSTEMS[name]
            continue
        try:
            found[name] = system(name)
        except ValueError as error:
            raise BadInput(f"--compare: {error}, {', '.join(specactor.SYSTEMS)}, {CONFIGURED}") from error
    return found


def _check_methods(scenario, systems: dict) -> None:
    from app.simulator import specactor

    asking = [name for name in systems if name in specactor.SYSTEMS]
    if asking and not scenario.methods:
        raise BadInput(f"--compare {asking[0]}: {scenario.name} names no draft model (`methods`); dapo-32b does")


def _run(scenario, systems: dict, seeds: int, steps: int, check: bool, spans: bool) -> tuple[dict, dict]:
    """Summaries of every system by seed, and the first seed's runs, with spans if a page is wanted."""
    from rich.console import Console
    from rich.progress import Progress

    from app.simulator import specactor
    from app.simulator.report import summary
    from app.simulator.systems import Setup

    summaries, pages = {name: [] for name in systems}, {}
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        for seed in range(seeds):
            setup = Setup.of(scenario, seed, steps)
            for name, chosen in systems.items():
                task = bar.add_task(f"{name}, seed {seed}", total=None)
                how = {"spans": spans and not seed, "check": check, "progress": partial(_show, bar, task)}
                if name in specactor.SYSTEMS:
                    run = specactor.run(scenario, name, seed, steps, **how)
                else:
                    run = setup.run(name, chosen, seed, **how)
                bar.remove_task(task)
                summaries[name].append(summary(run))
                if spans and not seed:
                    pages[name] = run
                if not console.is_terminal:
                    click.echo(f"{name}, seed {seed}: {run.makespan_s:.1f} s", err=True)
    return summaries, pages


def _show(bar, task, ended: int, samples: int) -> None:
    bar.update(task, completed=ended, total=samples)


def _page(scenario, pages: dict, result: dict) -> str:
    from app.simulator.page import page

    assumed = [f"Assumed: {key} = {value}. {text}" for key, value, kind, text in scenario.notes() if kind == "assumed"]
    return page(f"{scenario.name}: {scenario.about}", pages, result, assumed)


def _list(scenario, as_json: bool) -> None:
    from app.simulator import specactor
    from app.simulator.scenario import scenario_names
    from app.simulator.systems import SYSTEMS

    systems = {name: chosen.about for name, chosen in (SYSTEMS | specactor.SYSTEMS).items()}
    systems[CONFIGURED] = "the policies of --config"
    notes = [dict(zip(("key", "value", "kind", "why"), note, strict=True)) for note in scenario.notes()]
    if as_json:
        click.echo(json.dumps({"systems": systems, "workloads": scenario_names(), scenario.name: notes}))
        return
    from rich.console import Console
    from rich.table import Table

    known, figures = Table("system", "what it does"), Table("figure", "value", "from", title=scenario.about)
    for row in systems.items():
        known.add_row(*row)
    for note in notes:
        figures.add_row(note["key"], str(note["value"]), f"{note['kind']}: {note['why']}")
    Console().print("workloads:", ", ".join(scenario_names()))
    Console().print(known, figures)


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    from app.simulator.report import rows

    header, *body = rows(result)
    shown = [header.index(name) for name in SHOWN]
    table = Table(*SHOWN, title=f"{result['workload']}: against {result['baseline']}, {len(result['seeds'])} seed(s)")
    for row in body:
        table.add_row(*(row[column] for column in shown))
    console = Console()
    console.print(table)
    for key, (low, high) in result["claims"].items():
        console.print(f"claimed: {key.replace('_', ' ')} {low:g} to {high:g}", highlight=False)
