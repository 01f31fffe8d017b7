"""Errors that end a command. Bad input is one line that names the fault and its remedy.

`Unreachable` and `StillDeploying` are also the built-in errors that a driver catches.
"""

from collections.abc import Iterable
from difflib import get_close_matches

import click

EXTRAS = {
    "ray": "cpu", "vllm": "cpu", "torch": "cpu", "mooncake": "cpu", "transformers": "cpu", "tokenizers": "cpu",
    "safetensors": "cpu", "numba": "cpu", "llvmlite": "cpu", "jinja2": "cpu", "zmq": "cpu", "msgspec": "cpu",
    "prometheus_client": "cpu", "fastapi": "cpu", "starlette": "cpu", "uvicorn": "cpu", "blake3": "cpu",
    "zstandard": "cpu", "PIL": "cpu", "cachetools": "cpu", "psutil": "cpu", "xgrammar": "cpu", "triton": "cpu",
    "gguf": "cpu", "accelerate": "cpu", "aiohttp": "bench", "matplotlib": "bench", "arctic_inference": "bench",
    "trl": "train", "datasets": "train", "reasoning_gym": "train", "pebble": "train",
}  # fmt: skip
"""The extra of pyproject.toml that brings an import; `gpu` brings those of `cpu` too."""


class BadInput(click.ClickException):
    """Wrong input. The command ends with exit code 2."""

    exit_code = 2


class Failed(click.ClickException):
    """The work itself failed. The command ends with exit code 1."""

    exit_code = 1


class Unreachable(BadInput, ConnectionError):
    """No Ray cluster, or no such application, answers at an address."""


class StillDeploying(Failed, TimeoutError):
    """The application did not come up in time."""


class OtherCluster(BadInput, ValueError):
    """This process is connected to another Ray cluster than the requested one."""


class MissingExtra(BadInput):
    """The command needs a package that the light installation leaves out."""

    @classmethod
    def of(cls, error: ModuleNotFoundError) -> "MissingExtra | None":
        """Returns the one-line error for a missing import, or None if no extra brings that package."""
        package = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(package)
        if extra is None:
            return None
        return cls(f"{package} is not installed; run: pip install 'tailrace[{extra}]'")


def did_you_mean(name: str, known: Iterable[str], context: click.Context) -> click.UsageError:
    """Returns the error for an unknown command or sub-command, with the nearest known one."""
    near = get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"`{context.command_path} --help` lists them"
    return click.UsageError(f"no such command {name!r}; {hint}", context)
