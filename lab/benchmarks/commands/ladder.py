"""`tailrace bench ladder`: the gain of each draft method on this machine, by the share of its drafts that are right."""

import json
import tempfile
from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput
from tailrace.app.files.output_file import OutputFile, OutputKind, check_apart
from tailrace.lab.benchmarks.commands.output import picture_file

LADDER = OutputKind("a file of `bench ladder --out`", (b'{"ladders": ',))

FILE = click.Path(path_type=Path)
MODEL = "model"
"""Name of the method whose drafts are a draft model's."""

PROMPTS = 20
"""Number of prompts that are read from a trace: two samples of each give a mean within 0.03."""


@click.command()
@click.option("--config", type=FILE, default=DEFAULT_CONFIG, show_default="serve.yaml")
@click.option(
    "--profile", type=FILE, default=None, help="A file of `tailrace profile --out`; else the engine is profiled."
)
@click.option("--drafter", default=None, help="Also a draft model: its folder. It is profiled as an engine of its own.")
@click.option("--drafter-profile", type=FILE, default=None, help="Its file of `tailrace profile --out`, made before.")
@click.option("--acceptance", multiple=True, metavar="METHOD=RATE",
              help="Mean share of right draft tokens, where known; may be given again.")  # fmt: skip
@click.option("--trace", type=FILE, default=None, help="Rollouts from which to learn how often look-ups are right.")
@click.option("--out", type=FILE, default=None, help="Also write the JSON there: a ladder to race by.")
@click.option("--plot", type=FILE, default=None, help="A picture of all curves, .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(config, profile, drafter, drafter_profile, acceptance, trace, out, plot, as_json):
    """Profile the draft methods over acceptance rates, without the target's tokens (SpecActor 4.2).

    Costs are measured on this machine, in about a minute for each engine that has no profile yet. The first choice is
    the best single method for all samples when a step starts.
    """
    read = {"--config": config, "--profile": profile, "--drafter-profile": drafter_profile, "--trace": trace}
    check_apart({"--out": out, "--plot": plot}, read)
    out, plot = OutputFile.of(out, "--out", LADDER), picture_file(plot)
    engine, rates = load_config(config).application.args.engine, _rates(acceptance)
    from tailrace.lab.benchmarks.drafting.ladder import index_methods, ladders, model_method

    model_rate = _model_rate(drafter, drafter_profile, rates)
    rollouts = None if trace is None else _rollouts(trace, engine)
    cost = _cost(engine, profile)
    profiles = ({} if rollouts is None else _profiles(rollouts)) | {name: (rate,) for name, rate in rates.items()}
    methods = index_methods(profiles, _say)
    if model_rate is not None:
        folder = engine.model_copy(update={"model": drafter or engine.model})
        methods.append(model_method(_cost(folder, drafter_profile), model_rate))
    result = ladders(methods, cost, engine.max_running, engine.draft.draft_tokens)
    if out is not None:
        out.write(json.dumps(result) + "\n")
    if plot is not None:
        from tailrace.lab.benchmarks.drafting.ladder import picture

        picture(plot, result)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def _rates(given: tuple[str, ...]) -> dict[str, float]:
    from tailrace.lab.benchmarks.drafting.ladder import USUAL

    rates = {}
    for text in given:
        name, _, rate = text.partition("=")
        try:
            rates[name] = float(rate)
        except ValueError:
            raise BadInput(f"--acceptance {text}: give METHOD=RATE, such as ngram=0.4") from None
        if name not in (*USUAL, MODEL) or not 0 <= rates[name] <= 1:
            raise BadInput(f"--acceptance {text}: methods are {', '.join((*USUAL, MODEL))}, rates 0 to 1")
    return rates


def _model_rate(drafter: str | None, profile: Path | None, rates: dict[str, float]) -> float | None:
    """Returns the share of a draft model's tokens that are right, as given or as `distill-drafter` has measured it;
    None without a model. Raises BadInput if the share is unknown.
    """
    if drafter is None and profile is None:
        return None
    if MODEL in rates:
        return rates[MODEL]
    from tailrace.app.distill.drafter import measured

    rate = measured(Path(drafter)) if drafter else None
    if rate is None:
        named = f"--drafter {drafter}" if drafter else f"--drafter-profile {profile}"
        raise BadInput(f"{named}: nothing says how often it is right; add --acceptance {MODEL}=RATE")
    return rate


def _rollouts(trace: Path, engine) -> list:
    """Returns the rollouts of the trace's first PROMPTS prompts."""
    from tailrace.app.files.traces import read_trace
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.lab.benchmarks.drafting.drafts import read_rollouts

    lines = read_trace(trace)[:PROMPTS]
    return read_rollouts(lines, Prompts(str(resolve_model(engine.model)), 0).encode)


def _profiles(rollouts: list) -> dict[str, tuple[float, ...]]:
    from tailrace.lab.benchmarks.drafting.acceptance_profiles import profiles
    from tailrace.lab.benchmarks.drafting.ladder import look_up

    return profiles(rollouts, look_up, _say)


def _cost(engine, profile: Path | None):
    """Returns the cost of a step by its number of tokens, from a file or from an engine that is profiled now."""
    from tailrace.lab.benchmarks.drafting.budgets import cost_of

    if profile is not None:
        return cost_of(profile)
    from tailrace.app.model import resolve_model
    from tailrace.app.step_profile import measure

    result = measure(engine.model_copy(update={"model": str(resolve_model(engine.model))}), _say)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps(result))
        return cost_of(path)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for samples, of in result["ladders"].items():
        names = [f"{row['method']} (w)" for row in of["rungs"]]
        table = Table("right", *names, title=f"times as fast as plain decoding, {samples} at once")
        for place, (rate, _) in enumerate(of["rungs"][0]["curve"]):
            cells = (f"{row['curve'][place][1]:.2f} ({row['windows'][place]})" for row in of["rungs"])
            table.add_row(f"{rate:g}", *cells)
        console.print(table)
        profiles = ((row["method"], row["profile"]) for row in of["rungs"])
        means = ", ".join(f"{name} {sum(rates) / len(rates):.2f}" for name, rates in profiles)
        console.print(f"first choice at {means}: {of['first_choice'] or 'plain decoding'}", highlight=False)
