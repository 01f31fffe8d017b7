"""`python -m app COMMAND`: the command line. Commands load lazily, so `--help` imports no ray or vllm."""

import signal
import sys
from importlib import import_module

import click

COMMANDS = {
    "bench": "Benchmarks, live and modelled: `bench --help` lists them.",
    "compare": "What one simulation gains over another, system by system.",
    "distill-drafter": "Make a draft model from a target and the rollouts at hand.",
    "drafts": "What drafts are made from: inspect.",
    "history": "Answers of earlier epochs, from which later ones draft: import, list, forget.",
    "ladder": "What each draft method gains on this machine, by how often drafts are right.",
    "model": "Make the demo model (SmolLM2-135M-Instruct) on its own.",
    "policies": "List policy families, their members and knobs.",
    "pool": "The shared KV pool: status, drain, verify, chaos.",
    "profile": "Time the steps of the configured engine on this machine.",
    "rollout": "Roll out a file of prompts and write the samples.",
    "serve": "Start a local cluster and deploy the service on it.",
    "simulate": "Roll out the papers' workloads on modelled clusters, with the live decision code.",
    "timeline": "Draw what every replica did in a recorded run.",
    "verify": "Show that scheduling never changes a token.",
}


class LazyGroup(click.Group):
    """A click group whose members live in `app.commands.NAME` as an object called `command`."""

    def list_commands(self, ctx):
        return sorted(COMMANDS)

    def get_command(self, ctx, name):
        if name not in COMMANDS:
            return None
        return import_module(f"app.commands.{name.replace('-', '_')}").command

    def format_commands(self, ctx, formatter):
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.command(cls=LazyGroup)
def main():
    """Tailrace: exact, elastic rollouts for LLM reinforcement learning."""


def run(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 failed, 2 bad input. Every error is one line on stderr."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: what was started is stopped
    try:
        return main(arguments, prog_name="python -m app", standalone_mode=False) or 0
    except click.ClickException as error:
        click.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        return error.exit_code
    except click.Abort:
        click.echo("error: interrupted", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(run())
