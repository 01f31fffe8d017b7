"""`tailrace schema`: the JSON schema of `serve.yaml`, for editors and checks."""

import json
from pathlib import Path

import click

from tailrace.app.files.output_file import OutputFile, OutputKind

SCHEMA = OutputKind("a file of `schema --out`", (b'{\n  "$defs": {',), (b'"title": "ServeFile"',))


@click.command()
@click.option("--out", type=click.Path(path_type=Path, allow_dash=True), help="A file instead of stdout.")
def command(out):
    """Print the JSON schema of serve.yaml: every key with its type, default and meaning."""
    from tailrace.app.config import ServeFile

    file = None if out == Path("-") else OutputFile.of(out, "--out", SCHEMA)
    text = json.dumps(ServeFile.model_json_schema(), indent=2)
    if file is None:
        click.echo(text)
    else:
        file.write(text + "\n")
