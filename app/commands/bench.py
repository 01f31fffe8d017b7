"""`tailrace bench NAME`: runs a benchmark of the checkout; an installed package has none."""

import sys
from importlib import import_module
from pathlib import Path

import click

import tailrace
from tailrace.app.errors import BadInput, did_you_mean

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
    """The benchmarks' own group, loaded on first use."""

    def list_commands(self, ctx):
        return _load().list_commands(ctx)

    def get_command(self, ctx, cmd_name):
        return _load().get_command(ctx, cmd_name)

    def resolve_command(self, ctx, args):
        known = self.list_commands(ctx)
        if args and args[0] not in known:
            raise did_you_mean(args[0], known, ctx)
        return super().resolve_command(ctx, args)


@click.command(cls=Benches)
def command():
    """Benchmarks. Every figure comes with its baseline, measured in the same run."""
