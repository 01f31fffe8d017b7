"""`python -m app COMMAND`: the command line. Commands load lazily, so `--help` imports no ray or vllm."""

from importlib import import_module

import click

COMMANDS = {
    "bench": "Benchmarks: scheduler, live.",
    "model": "Make the demo model (SmolLM2-135M-Instruct) on its own.",
    "policies": "List policy families, their members and knobs.",
    "rollout": "Roll out a file of prompts and write the samples.",
    "verify": "Show that scheduling never changes a token.",
}


class LazyGroup(click.Group):
    """A click group whose members live in `app.commands.NAME` as an object called `command`."""

    def list_commands(self, ctx):
        return sorted(COMMANDS)

    def get_command(self, ctx, name):
        if name not in COMMANDS:
            return None
        return import_module(f"app.commands.{name}").command

    def format_commands(self, ctx, formatter):
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.command(cls=LazyGroup)
def main():
    """Tailrace: exact, elastic rollouts for LLM reinforcement learning."""


if __name__ == "__main__":
    main(prog_name="python -m app")
