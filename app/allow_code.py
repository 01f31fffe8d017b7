"""The option `--allow-code PACKAGE` of commands that read a configuration. Its packages are sent to the service with
the file.
"""

import click

from tailrace.app.errors import BadInput
from tailrace.policies.families.allowed_code import allow_code


def _allow(context: click.Context, option: click.Parameter, packages: tuple[str, ...]) -> None:
    try:
        allow_code(*packages)
    except ValueError as error:
        raise BadInput(f"--allow-code: {str(error).removeprefix('allowed_code: ')}") from error


allow_code_option = click.option(
    "--allow-code", multiple=True, metavar="PACKAGE", expose_value=False, is_eager=True, callback=_allow,
    help="Allow policies of this package by dotted path. Repeatable.",
)  # fmt: skip
"""Adds no argument to the command: `allow_code` is called before the command runs."""
