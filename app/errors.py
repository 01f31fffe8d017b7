"""Errors that end a command. Bad input is one line that names the fault and its mend.

`Unreachable` and `StillDeploying` are also the built-in errors that a driver catches.
"""

import click


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
