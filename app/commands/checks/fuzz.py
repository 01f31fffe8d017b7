"""`tailrace fuzz`: the live shell under random faults, on a virtual clock; exit 1 if a seed fails."""

import json
import time

import click
from rich.console import Console
from rich.progress import Progress

from tailrace.app.errors import BadInput, Failed


@click.command()
@click.option("--seeds", type=click.IntRange(min=1), default=200, show_default=True, help="How many seeds to run.")
@click.option("--first", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option("--kinds", default=None, metavar="A,B", show_default="all", help="Only faults of these kinds.")
@click.option("--workers", type=click.IntRange(min=1), default=None, show_default="one per core")
@click.option("--shorten", is_flag=True, help="Print the shortest schedule that still fails, of the first failure.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(seeds, first, kinds, workers, shorten, as_json):
    """Run the real coordinator, engine loops and client over simulated engines, with faults by seed.

    Each seed is one history: replicas die, hang and lie, drivers vanish, coordinators restart, weights change. Every
    token is checked, every batch must end, and nothing may be left over.
    """
    from tailrace.app.fuzz.campaign import campaign, described, faults_by_kind
    from tailrace.app.fuzz.faults import KINDS
    from tailrace.app.fuzz.run import plan_of, shortened

    chosen = tuple(kinds.split(",")) if kinds else tuple(KINDS)
    unknown = next((kind for kind in chosen if kind not in KINDS), None)
    if unknown is not None:
        raise BadInput(f"--kinds {unknown}: known: {', '.join(KINDS)}")
    began_s, outcomes = time.monotonic(), []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("seeds", total=seeds)
        for outcome in campaign(range(first, first + seeds), chosen, workers):
            outcomes.append(outcome)
            bar.advance(task)
            if outcome.problem is not None:
                bar.console.print(f"seed {outcome.seed}: {outcome.problem}", highlight=False)
    failures = {outcome.seed: outcome.problem for outcome in outcomes if outcome.problem is not None}
    result = {
        "seeds": seeds,
        "failures": dict(sorted(failures.items())),
        "seeds_per_min": round(60 * seeds / (time.monotonic() - began_s)),
        "faults": faults_by_kind(outcomes),
        "samples": sum(outcome.samples for outcome in outcomes),
        "tokens": sum(outcome.tokens for outcome in outcomes),
        "virtual_s": round(sum(outcome.seconds for outcome in outcomes)),
    }
    if failures and shorten:
        for line in described(shortened(plan_of(min(failures), chosen))):
            click.echo(line, err=True)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)
    if failures:
        raise Failed(f"{len(failures)} of {seeds} seeds fail; the first: {min(failures)}")


def _print(result: dict) -> None:
    click.echo(
        f"{result['seeds']} seeds, {result['seeds_per_min']} a minute: {result['samples']} samples, "
        f"{result['tokens']} tokens, {result['virtual_s'] / 3600:.1f} simulated hours"
    )
    click.echo("faults: " + ", ".join(f"{kind} {count}" for kind, count in result["faults"].items()))
