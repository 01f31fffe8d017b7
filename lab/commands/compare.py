"""`tailrace compare A.json B.json`: the gain of the second simulation over the first, system by system."""

import json
from pathlib import Path

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailrace.app.config import first_error
from tailrace.app.errors import BadInput
from tailrace.app.strict_json import parse_json
from tailrace.lab.simulator.report import spread

FILE = click.Path(path_type=Path)


class Figures(BaseModel):
    """Figures of one system and seed; a figure that does not apply is None. Other keys of the file are ignored."""

    model_config = ConfigDict(allow_inf_nan=False)

    seed: int
    tokens_per_s: float
    makespan_s: float
    tail_s: float
    mean_sample_s: float | None
    replica_s: float | None
    idle_share: float | None
    bound_share: float | None
    reachable_share: float | None = None
    acceptance_length: float | None
    moves: float
    preemptions: float
    recomputed_tokens: float


class Simulated(BaseModel):
    """A file as `simulate --json` writes it."""

    workload: str
    systems: dict[str, list[Figures]] = Field(min_length=1)


METRICS = tuple(name for name in Figures.model_fields if name != "seed")


@click.command()
@click.argument("a", type=FILE, metavar="A.json")
@click.argument("b", type=FILE, metavar="B.json")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(a, b, as_json):
    """Compare two files of `simulate --out`: the ratio B / A of each system and figure, seed by seed."""
    result = compared(a, b)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def compared(a: Path, b: Path) -> dict:
    """Returns `ratio`: {system: {figure: [mean, min, max] of B / A over the shared seeds, or None where undefined}}."""
    first, second = read(a), read(b)
    if first.workload != second.workload:
        raise BadInput(f"{b}: workload: {second.workload}, but that of {a} is {first.workload}")
    shared = [system for system in first.systems if system in second.systems]
    if not shared:
        raise BadInput(f"{b}: systems: none of those of {a} ({', '.join(first.systems)})")
    return {
        "workload": first.workload,
        "a": str(a),
        "b": str(b),
        "ratio": {system: _ratios(system, first, second, b) for system in shared},
        "only_a": [system for system in first.systems if system not in second.systems],
        "only_b": [system for system in second.systems if system not in first.systems],
    }


def read(path: Path) -> Simulated:
    """Reads a report. Raises BadInput, in one line that names the file and the key."""
    try:
        return Simulated.model_validate(parse_json(path.read_bytes()))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise BadInput(f"{path}: {first_error(error)}; give a file of `simulate --out`") from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}; give a file of `simulate --out`") from error


def _ratios(system: str, first: Simulated, second: Simulated, b: Path) -> dict:
    before = {one.seed: one for one in first.systems[system]}
    pairs = [(before[one.seed], one) for one in second.systems[system] if one.seed in before]
    if not pairs:
        raise BadInput(f"{b}: systems.{system}: no seed in common with the other file")
    return {metric: _spread([_over(getattr(y, metric), getattr(x, metric)) for x, y in pairs]) for metric in METRICS}


def _over(value: float | None, by: float | None) -> float | None:
    return value / by if by and value is not None else None


def _spread(values: list[float | None]) -> list[float] | None:
    found = spread(values)
    return found and [round(value, 4) for value in found]


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("system", "figure", "B / A", "min", "max", title=f"{result['workload']}: B / A")
    for system, figures in result["ratio"].items():
        for metric, ratio in figures.items():
            if ratio:
                table.add_row(system, metric.replace("_", " "), *(f"{value:.3f}" for value in ratio))
        table.add_section()
    console = Console()
    console.print(table)
    for side in ("a", "b"):
        if only := result[f"only_{side}"]:
            console.print(f"only in {result[side]}: {', '.join(only)}", highlight=False, markup=False)
