"""`tailrace schema`: the JSON schema of `serve.yaml`, for editors and checks."""

import json

import click


@click.command()
@click.option("--out", type=click.File("w"), default="-", help="A file instead of stdout.")
def command(out):
    """Print the JSON schema of serve.yaml: every key with its type, default and meaning."""
    from tailrace.app.config import ServeFile

    click.echo(json.dumps(ServeFile.model_json_schema(), indent=2), file=out)
