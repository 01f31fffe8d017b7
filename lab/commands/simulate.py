"""`tailrace simulate`: the policies of a configuration, and the papers' systems, over a modelled cluster."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from tailrace.app.allow_code import allow_code_option
from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput
from tailrace.app.files.output_file import OutputFile, OutputKind, check_apart
from tailrace.lab.report.document import PAGE

SIMULATION = OutputKind("a file of `simulate --out`", (b'{"workload": "',), (b'"systems": {',))

CONFIGURED = "config"
"""Name of the system whose policies the configuration names."""

TRACES = (".jsonl", ".gz")
"""Suffixes of workloads that are recorded rollouts."""

TRACE_CLUSTER = "das-7b-16k"
"""Name of the set-up whose cluster traces run on: one node, a replica on each GPU."""

SHOWN = ("system", "throughput", "tail", "makespan s", "tail s", "of bound", "of work + longest", "of clairvoyant")
"""Columns of the table, which fit a terminal. The last one is there only if `clairvoyant` is compared. The JSON and the
page have all columns.
"""


class ExtraSystems(NamedTuple):
    """Systems beyond the product's own. `systems`: by name, each with an `about`. `run`: simulates one of them."""

    systems: Mapping[str, Any]
    run: Callable | None = None


NO_EXTRA = ExtraSystems({})


@click.command()
@click.option("--workload", default="moonlight", show_default=True,
              help="A paper's set-up by name, or a file: a set-up, or recorded rollouts (.jsonl, .gz).")  # fmt: skip
@click.option("--acceptance", type=click.Choice(["table", "replay"]), default="table", show_default=True,
              help="Source of accepted drafts: a measured table, or an engine's own index.")  # fmt: skip
@click.option("--cluster", default=None, help=f"The set-up on whose cluster a trace runs.  [default: {TRACE_CLUSTER}]")
@click.option("--tokenizer", default="demo", show_default=True, help="Tokenizer of a trace: a model's folder, or demo.")
@click.option("--compare", default=f"verl,{CONFIGURED}", show_default=True, help="Systems; the first is the baseline.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@allow_code_option
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Draws of the workload.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Training steps.")
@click.option("--scale", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True,
              help="Share of replicas and prompts.")  # fmt: skip
@click.option("--account", is_flag=True, help="Say where the seconds of the sample that ended last went.")
@click.option("--check", is_flag=True, help="Verify the laws at every event.")
@click.option("--report", type=click.Path(path_type=Path), default=None, help="Also write one HTML page, of seed 0.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Also write the JSON to this file.")
@click.option("--list", "listing", is_flag=True, help="List the choices, and the assumptions of a workload.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(**options):
    """Roll out a paper's workload by several systems on a modelled cluster, with the live decision code.

    Ratios are to the first system, seed by seed: [mean, min, max]. The system `config` has the policies of --config. If
    the workload is recorded rollouts, their last checkpoint is rolled out, and the earlier ones are history. With
    `--acceptance replay` every draft is really made and compared, which takes 0.1 to 0.2 ms of real time per
    verification.
    """
    run(NO_EXTRA, **options)


def run(
    extra: ExtraSystems, *, workload, acceptance, cluster, tokenizer, compare, config, seeds, steps, scale, account,
    check, report, out, listing, as_json,
):  # fmt: skip
    """Runs the command, with `extra` systems besides the product's own. Raises BadInput."""
    from tailrace.lab.simulator.report import ratios

    trace = Path(workload) if workload.endswith(TRACES) else None
    if trace is None and (cluster is not None or acceptance == "replay"):
        given = "--cluster" if cluster is not None else "--acceptance replay"
        raise BadInput(f"{given}: for recorded rollouts only; give one by --workload FILE.jsonl, or leave it out")
    scenario = load_setup(workload) if trace is None else load_setup(cluster or TRACE_CLUSTER, "--cluster")
    if listing:
        _list(scenario, extra, as_json)
        return
    check_apart({"--report": report, "--out": out}, {"--workload": Path(workload), "--config": config})
    report, out = OutputFile.of(report, "--report", PAGE), OutputFile.of(out, "--out", SIMULATION)
    systems = _systems(compare, config, extra)
    _check_methods(scenario, systems, extra, trace, steps)
    scenario = scenario.scaled(scale) if scale < 1 else scenario
    setup_of = _papers(scenario, steps) if trace is None else _traces(trace, scenario, scale, tokenizer, acceptance)
    spans = seeds if account else int(report is not None)
    summaries, pages = _run(scenario, setup_of, systems, extra, seeds, steps, check, spans)
    result = ratios(summaries, next(iter(systems)))
    result |= {"claims": {key: list(claim.value) for key, claim in scenario.claims.items() if trace is None}}
    if out is not None:
        out.write(json.dumps(result) + "\n")
    if report is not None:
        title = f"{scenario.name}: {scenario.about}" if trace is None else f"{trace.name} on {scenario.name}'s cluster"
        report.write(_page(title, scenario, pages, result))
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result, account)


def load_setup(name: str, option: str = "--workload"):
    """Loads a scenario by name or path. Raises BadInput that names the option."""
    from tailrace.lab.simulator.scenario import load_scenario

    try:
        return load_scenario(name)
    except ValueError as error:
        raise BadInput(f"{option} {error}") from error


def _papers(scenario, steps: int) -> Callable:
    """Returns a function that makes the set-up of a seed."""
    from tailrace.lab.simulator.systems import Setup

    return lambda seed: Setup.of(scenario, seed, steps)


def _traces(trace: Path, scenario, scale: float, tokenizer: str, acceptance: str) -> Callable:
    """Returns a function that returns the same set-up for every seed: nothing of the workload is drawn."""
    setup = trace_setup(trace, scenario, scale, tokenizer, acceptance)
    return lambda seed: setup


def trace_setup(trace: Path, scenario, scale: float, tokenizer: str, acceptance: str):
    """Returns the set-up of a trace on the scenario's cluster. `scale`: share of the prompts that are read, the first
    ones. Raises BadInput.
    """
    from tailrace.app.files.traces import read_trace

    lines = read_trace(trace)
    lines = lines[: max(1, round(scale * len(lines)))]
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.lab.replay.recorded import of_trace
    from tailrace.lab.replay.setup import TraceSetup

    encode = Prompts(str(resolve_model(tokenizer)), max_model_len=0).encode
    found = of_trace(lines, encode, scenario.samples.value, scenario.max_tokens.value)
    return TraceSetup.of(scenario, trace.name.split(".")[0], found, acceptance == "replay")


def _systems(compare: str, config: Path, extra: ExtraSystems) -> dict:
    from tailrace.lab.simulator.systems import system

    names = list(dict.fromkeys(name.strip() for name in compare.split(",") if name.strip()))
    if not names:
        raise BadInput("--compare: name at least one system; `simulate --list` shows them")
    found = {}
    for name in names:
        if name == CONFIGURED:
            found[name] = _configured(config)
            continue
        if name in extra.systems:
            found[name] = extra.systems[name]
            continue
        try:
            found[name] = system(name)
        except ValueError as error:
            raise BadInput(f"--compare: {error}, {', '.join((*extra.systems, CONFIGURED))}") from error
    return found


def _configured(config: Path):
    from tailrace.lab.simulator.systems import System
    from tailrace.policies.families.registry import name_of

    configured = load_config(config).application.policies
    for key, asks in (("tail", "wants_drafters"), ("draft_models", "needs_drafter")):
        if getattr(getattr(configured, key), asks, False):
            name = name_of(getattr(configured, key))
            raise BadInput(f"--compare {CONFIGURED}: draft models beside engines are not modelled; {key} is {name}")
    policies = configured.model_dump()
    del policies["chunking"]  # sized for this machine's models; the workload has its own chunks and draft methods
    racing = policies.pop("racing")["type"]
    if racing not in ("off", "fastest_of_n"):
        raise BadInput(f"--compare {CONFIGURED}: races by the workload's methods only, with fastest_of_n, not {racing}")
    return System(f"the policies of {config.name}", policies, races=racing != "off")


def _check_methods(scenario, systems: dict, extra: ExtraSystems, trace: Path | None, steps: int) -> None:

    asking = [name for name, chosen in systems.items() if name in extra.systems or chosen.races]
    if asking and trace is not None:
        raise BadInput(f"--compare {asking[0]}: has draft models, whose drafts no trace records; name others")
    if steps > 1 and trace is not None:
        raise BadInput(f"--steps {steps}: recorded rollouts are one step, the last checkpoint's; leave --steps out")
    if asking and not scenario.methods:
        raise BadInput(f"--compare {asking[0]}: {scenario.name} names no draft model (`methods`); dapo-32b does")


def _run(
    scenario, setup_of, systems: dict, extra: ExtraSystems, seeds: int, steps: int, check: bool, spans: int
) -> tuple[dict, dict]:
    """Returns the summaries of every system by seed, and the runs of the first seed. `spans`: number of seeds whose
    runs record spans.
    """
    from rich.console import Console
    from rich.progress import Progress

    from tailrace.lab.simulator.report import summary

    summaries, pages = {name: [] for name in systems}, {}
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        for seed in range(seeds):
            setup = setup_of(seed)
            for name, chosen in systems.items():
                task = bar.add_task(f"{name}, seed {seed}", total=None)
                how = {"spans": seed < spans, "check": check, "progress": partial(_show, bar, task)}
                began_s = time.monotonic()
                if name in extra.systems:
                    run = extra.run(scenario, name, seed, steps, **how)
                else:
                    run = setup.run(name, chosen, seed, **how)
                bar.remove_task(task)
                summaries[name].append(summary(run))
                if not seed:
                    pages[name] = run
                if not console.is_terminal:
                    took_s = time.monotonic() - began_s
                    click.echo(f"{name}, seed {seed}: {run.makespan_s:.1f} s, simulated in {took_s:.1f} s", err=True)
    return summaries, pages


def _show(bar, task, ended: int, samples: int) -> None:
    bar.update(task, completed=ended, total=samples)


def _page(title: str, scenario, pages: dict, result: dict) -> str:
    from tailrace.lab.report.simulation_page import page

    assumed = [f"Assumed: {key} = {value}. {text}" for key, value, kind, text in scenario.notes() if kind == "assumed"]
    return page(title, pages, result, assumed)


def _list(scenario, extra: ExtraSystems, as_json: bool) -> None:
    from tailrace.lab.simulator.scenario import scenario_names
    from tailrace.lab.simulator.systems import SYSTEMS

    systems = {name: chosen.about for name, chosen in (SYSTEMS | extra.systems).items()}
    systems[CONFIGURED] = "the policies of --config"
    notes = [dict(zip(("key", "value", "kind", "why"), note, strict=True)) for note in scenario.notes()]
    if as_json:
        click.echo(json.dumps({"systems": systems, "workloads": scenario_names(), scenario.name: notes}))
        return
    from rich.console import Console
    from rich.table import Table

    known, figures = Table("system", "about"), Table("figure", "value", "from", title=scenario.about)
    for row in systems.items():
        known.add_row(*row)
    for note in notes:
        figures.add_row(note["key"], str(note["value"]), f"{note['kind']}: {note['why']}")
    Console().print("workloads:", ", ".join(scenario_names()))
    Console().print(known, figures)


def _print(result: dict, account: bool) -> None:
    from rich.console import Console

    from tailrace.lab.simulator.report import account_rows, rows

    console, table = Console(), rows(result)
    shown = [table[0].index(name) for name in SHOWN if name in table[0]]
    title = f"{result['workload']}: against {result['baseline']}, {len(result['seeds'])} seed(s)"
    console.print(_table([[row[column] for column in shown] for row in table], title))
    if account:
        title = "seconds of the sample that ended last, and what bounds the makespan"
        console.print(_table(account_rows(result), title))
    for key, claim in result["claims"].items():
        console.print(claim_line(key, claim, result), highlight=False)


def _table(rows: Sequence[Sequence[str]], title: str):
    from rich.table import Table

    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def claim_line(key: str, claim: Sequence[float], result: dict) -> str:
    """Returns a paper's claim in words, with the mean ratio of each compared system if the result has that ratio."""
    low, high = claim
    said = f"claimed: {key.replace('_', ' ')} {low:g}" + (f" to {high:g}" if low != high else "")
    found = result.get(key)
    ratios = {name: ratio for name, ratio in found.items() if ratio} if isinstance(found, dict) else {}
    ours = [f"{name} {ratio[0]:.2f}" for name, ratio in ratios.items() if name != result["baseline"]]
    return said + (f"; here: {', '.join(ours)}" if ours else "")
