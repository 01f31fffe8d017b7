"""`tailrace bench specactor`: `tailrace simulate` with SpecActor's systems to compare."""

import click

from tailrace.lab.commands import simulate
from tailrace.lab.research.specactor.systems import SYSTEMS
from tailrace.lab.research.specactor.systems import run as run_specactor

EXTRA = simulate.ExtraSystems(SYSTEMS, run_specactor)


def _run(**options) -> None:
    simulate.run(EXTRA, **options)


command = click.Command(
    "specactor", params=simulate.command.params, callback=_run,
    help="Simulate a paper's workload under SpecActor's systems; options as of `tailrace simulate`.",
)  # fmt: skip
