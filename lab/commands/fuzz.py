"""`tailrace fuzz`: the real coordinator under random faults, on a virtual clock; exit 1 if a seed fails."""

import json
import time
from collections import Counter
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import Progress

from tailrace.app.errors import BadInput, Failed


@click.command()
@click.option("--seeds", type=click.IntRange(min=1), default=200, show_default=True, help="How many seeds to run.")
@click.option("--first", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option("--kinds", default=None, metavar="A,B", show_default="all", help="Only faults of these kinds.")
@click.option("--always", default="", metavar="A,B", help="Every seed has these worlds, such as lanes.")
@click.option("--workers", type=click.IntRange(min=1), default=None, show_default="one per core")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Keep outcomes here, and continue from it."
)
@click.option(
    "--exactness",
    type=click.Choice(["bits", "law"]),
    default="bits",
    show_default=True,
    help="law: two candidates are close at a share of positions, and each attempt takes one.",
)
@click.option("--shorten", is_flag=True, help="Print the shortest schedule that still fails, of the first failure.")
@click.option("--engine", is_flag=True, help="Fuzz a real engine with odd requests instead; see the other options.")
@click.option("--minutes", type=click.FloatRange(min=0.0), default=1.0, show_default=True, help="Of --engine.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of --engine's requests.")
@click.option("--request", "requests", multiple=True, metavar="JSON", help="Of --engine: run these alone, one round.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(seeds, first, kinds, always, workers, out, exactness, shorten, engine, minutes, seed, requests, as_json):
    """Run the real coordinator, engine loops and client over simulated engines, with faults by seed.

    Each seed is one history: replicas die, hang and lie, drivers vanish, coordinators restart, weights change. Every
    token is checked, every batch must end, and nothing may be left over. Some seeds have worlds too, such as quotas,
    batches that grow and little KV; each world has its own laws.

    With --engine, odd requests go to a real engine for some minutes, among healthy ones. The fields of odd requests
    have usual, edge and absurd values. Each request must be answered or refused in time, the engine must live, and
    healthy requests must get the same tokens as without odd ones.
    """
    _check_options(engine)
    if engine:
        from tailrace.lab.commands.engine_fuzz import fuzz_engine

        return fuzz_engine(seed, minutes, requests, as_json)
    from tailrace.lab.fuzz.campaign import described, shortened
    from tailrace.lab.fuzz.run import plan_of

    chosen = _kinds(kinds, always)
    result = _run(range(first, first + seeds), chosen, workers, out, exactness)
    failures = result["failures"]
    if failures and shorten:
        for line in described(shortened(plan_of(min(failures), chosen, exactness=exactness))):
            click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)
    if failures:
        raise Failed(f"{len(failures)} of {seeds} seeds fail; the first: {min(failures)}")


def _kinds(kinds: str | None, always: str) -> tuple[str, ...]:
    """Returns the kinds of faults, oddities and worlds of a run, in the same order however they were given: a seed's
    history depends on it. Raises BadInput for an unknown kind.
    """
    from tailrace.lab.fuzz.faults import KINDS
    from tailrace.lab.fuzz.odd.plan import ODDITIES
    from tailrace.lab.fuzz.worlds.plan import ALWAYS, WORLDS

    known = (*KINDS, *ODDITIES, *WORLDS)
    chosen = kinds.split(",") if kinds else known
    worlds = always.split(",") if always else []
    for option, asked, choices in (("kinds", chosen, known), ("always", worlds, WORLDS)):
        unknown = next((kind for kind in asked if kind not in choices), None)
        if unknown is not None:
            raise BadInput(f"--{option} {unknown}: known: {', '.join(choices)}")
    return (*(kind for kind in known if kind in chosen), *(world + ALWAYS for world in worlds))


OF_SEEDS = ("seeds", "first", "kinds", "always", "workers", "out", "exactness", "shorten")
OF_ENGINE = ("minutes", "seed", "requests")
"""Options of a run without --engine, and of a run with it, by their names in `command`."""


def _check_options(engine: bool) -> None:
    """Raises BadInput for an option that this kind of run does not have and would ignore."""
    context = click.get_current_context()
    for name in OF_SEEDS if engine else OF_ENGINE:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = f"--{name.removesuffix('s') if name == 'requests' else name}"
            raise BadInput(f"{option} is {'not' if engine else 'only'} for runs with --engine; remove one of them")


def _run(seeds: range, kinds: tuple[str, ...], workers: int | None, out: Path | None, exactness: str) -> dict:
    """Runs the seeds that are not in `out` yet. Returns the report of all `seeds`."""
    from tailrace.lab.fuzz.campaign import campaign
    from tailrace.lab.fuzz.outcomes_file import OutcomeLine, OutcomesFile, code_digest

    file = OutcomesFile(out, code_digest(), kinds, exactness) if out is not None else None
    lines = [line for seed, line in file.lines.items() if seed in seeds] if file is not None else []
    done, began_s = {line.seed for line in lines}, time.monotonic()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("seeds", total=len(seeds), completed=len(done))
        for outcome in campaign((seed for seed in seeds if seed not in done), kinds, workers, exactness):
            lines.append(line := OutcomeLine.of(outcome))
            if file is not None:
                file.add(line)
            bar.advance(task)
            if outcome.problem is not None:
                bar.console.print(f"seed {outcome.seed}: {outcome.problem}", highlight=False)
    if file is not None:
        file.close()
    per_min = round(60 * (len(lines) - len(done)) / (time.monotonic() - began_s))
    return _report(lines) | {"seeds_per_min": per_min}


def _report(lines: list) -> dict:
    """Returns the sums over all outcomes. `lines`: a list of OutcomeLine."""
    faults: Counter[str] = Counter()
    for line in lines:
        faults.update(line.faults)
    return {
        "seeds": len(lines),
        "failures": {
            line.seed: line.problem for line in sorted(lines, key=lambda line: line.seed) if line.problem is not None
        },
        "faults": dict(sorted(faults.items())),
        "samples": sum(line.samples for line in lines),
        "tokens": sum(line.tokens for line in lines),
        "virtual_s": round(sum(line.virtual_s for line in lines)),
    }


def _print(result: dict) -> None:
    click.echo(
        f"{result['seeds']} seeds, {result['seeds_per_min']} a minute: {result['samples']} samples, "
        f"{result['tokens']} tokens, {result['virtual_s'] / 3600:.1f} simulated hours"
    )
    click.echo("faults: " + ", ".join(f"{kind} {count}" for kind, count in result["faults"].items()))
