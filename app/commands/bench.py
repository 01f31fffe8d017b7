"""`tailrace bench NAME`: runs a benchmark of the checkout; an installed package has none."""

import sys
from importlib import import_module
from pathlib import Path

import click

import tailrace
from tailrace.app.errors import BadInput

BENCHMARKS = "benchmarks.commands.bench"
"""Named by string: benchmarks import the product, never the reverse."""


def _load() -> click.Command:
    checkout = Path(tailrace.__file__).resolve().parent.parent
    if not (checkout / "benchmarks" / "__init__.py").exists():
        raise BadInput("bench: benchmarks come with a checkout; clone the repository and `pip install -e .` there")
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))  # last: an editable install shows `tailrace` alone
    return import_module(BENCHMARKS).command


class Benches(click.Group):
    """The benchmarks' own group, loaded when it is asked for."""

    def list_commands(self, ctx):
        return _load().list_commands(ctx)

    def get_command(self, ctx, cmd_name):
        return _load().get_command(ctx, cmd_name)


@click.command(cls=Benches)
def command():
    """Benchmarks; every figure stands beside its baseline of the same run."""
