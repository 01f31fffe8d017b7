"""`tailrace COMMAND`: the command line. Commands load lazily, so `--help` imports no Ray and no vLLM.

Invariant: every error is one line on stderr, with exit code 1 (failed) or 2 (bad input, or a package is missing).
"""

import signal
import sys
from importlib import import_module, metadata

import click
from click.exceptions import NoArgsIsHelpError

from tailrace.app.errors import MissingExtra, did_you_mean

COMMANDS = {
    "bench": "Run a benchmark: `bench --help` lists them.",
    "board": "Serve a page that shows a running service as it changes.",
    "compare": "Compare two simulations, system by system.",
    "demo": "Roll out the same prompts by static groups and by Tailrace.",
    "distill-drafter": "Make a draft model from a target and the rollouts at hand.",
    "drafts": "Inspect what drafts are made from.",
    "fuzz": "Run the live shell under random faults, on a virtual clock.",
    "history": "Import, list and forget the answers of earlier epochs.",
    "logs": "Show all that a service knows of a sample or batch.",
    "model": "Make the demo model (SmolLM2-135M-Instruct).",
    "plan": "Say which parallelism to run on some GPUs, by the step model.",
    "policies": "List policy families, their members and knobs.",
    "pool": "Show, drain, verify and disturb the shared KV pool.",
    "profile": "Time the steps of the configured engine on this machine.",
    "rollout": "Roll out a file of prompts and write the samples.",
    "schema": "Print the JSON schema of serve.yaml.",
    "serve": "Start a local cluster and deploy the service on it.",
    "simulate": "Simulate the papers' workloads with the live decision code.",
    "simulate-training": "Simulate whole steps of training, in several modes.",
    "soak": "Disturb a real service at random for an hour; check every token.",
    "status": "Show a service: replicas, batches, KV pool, the longest samples.",
    "timeline": "Draw what every replica did in a recorded run.",
    "top": "Follow a service in the terminal.",
    "train": "Train a model on a task, with samples of the service.",
    "verify": "Show that scheduling never changes a token.",
}


VIEWS = "logs", "status", "top"
LAB = "board", "compare", "demo", "fuzz", "plan", "pool", "simulate", "simulate-training", "soak", "timeline", "verify"
PLACES = dict.fromkeys(VIEWS, "app/commands/views") | dict.fromkeys(LAB, "lab/commands")
PLACES["bench"] = "lab/benchmarks/commands"
"""Folders of the commands that show a service, and of those that simulate, check or draw; the others are in
`app/commands`.
"""


class LazyGroup(click.Group):
    """A click group whose members are modules of PLACES or `app/commands`, each with an object called `command`."""

    def list_commands(self, ctx):
        return sorted(COMMANDS)

    def get_command(self, ctx, cmd_name):
        if cmd_name not in COMMANDS:
            return None
        folder = PLACES.get(cmd_name, "app/commands").replace("/", ".")
        return import_module(f"tailrace.{folder}.{cmd_name.replace('-', '_')}").command

    def resolve_command(self, ctx, args):
        if args and args[0] not in COMMANDS:
            raise did_you_mean(args[0], COMMANDS, ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx, formatter):
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


def version() -> str:
    """Returns the installed version of the package, or `unknown` if it runs uninstalled."""
    try:
        return metadata.version("tailrace")
    except metadata.PackageNotFoundError:
        return "unknown"


@click.command(cls=LazyGroup)
@click.version_option(version(), prog_name="tailrace", message="%(prog)s %(version)s")
def main():
    """Tailrace: exact, elastic rollouts for LLM reinforcement learning."""


def run(arguments: list[str] | None = None) -> int:
    """Runs a command. Returns its exit code: 0 done, 1 failed, 2 bad input. Every error is one line on stderr."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: started processes are stopped
    try:
        return _main(arguments)
    except NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        click.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        return error.exit_code
    except click.Abort:
        click.echo("error: interrupted", err=True)
        return 1


def _main(arguments: list[str] | None) -> int:
    """Runs click's command. Raises MissingExtra if an extra's package is not installed."""
    try:
        return main(arguments, prog_name="tailrace", standalone_mode=False) or 0
    except ModuleNotFoundError as error:
        if (missing := MissingExtra.of(error)) is None:
            raise
        raise missing from error


def main_exit() -> None:
    """Runs the `tailrace` command."""
    sys.exit(run())
