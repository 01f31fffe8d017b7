"""Errors that end a command. Bad input is one line that names what is wrong and how to mend it."""

import click


class BadInput(click.ClickException):
    """Wrong input; the command ends with exit code 2."""

    exit_code = 2


class Failed(click.ClickException):
    """The work itself failed; the command ends with exit code 1."""

    exit_code = 1
