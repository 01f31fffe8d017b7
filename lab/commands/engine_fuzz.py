"""`tailrace fuzz --engine`: a real engine under odd requests among healthy ones; exit 1 if a check fails."""

import json
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.status import Status

from tailrace.app.errors import BadInput, Failed

DRAFTS = {"method": "group", "draft_tokens": 4}


def fuzz_engine(seed: int, minutes: float, given: tuple[str, ...], as_json: bool, model: str = "demo") -> None:
    """Fuzzes an engine for some minutes, or runs the `given` requests (JSON each) in one round, and prints a report.
    Raises Failed if there are problems.
    """
    from tailrace.app.model import resolve_model
    from tailrace.lab.fuzz.engine.engine_campaign import engine_campaign
    from tailrace.lab.fuzz.engine.hosted import HostedEngine

    requests = [_request(text) for text in given]
    engine = HostedEngine(str(resolve_model(model)), DRAFTS)
    console = Console(stderr=True)
    try:
        if requests:
            result = engine.run(requests)
            click.echo(json.dumps(result) if as_json else _described(result))
            if result["problems"]:
                raise Failed(f"{len(result['problems'])} problems of {len(requests)} requests")
            return
        heard = partial(console.print, soft_wrap=True, highlight=False, markup=False)
        with Status("odd requests", console=console) as status:
            report = engine_campaign(engine, seed, 60 * minutes, heard, status.update)
    finally:
        engine.close()
    values = report.values()
    click.echo(json.dumps(values) if as_json else _lines(values))
    if values["findings"]:
        raise Failed(f"{len(values['findings'])} problems; the first: {values['findings'][0]['command']}")


def _request(text: str) -> dict:
    """Returns a request that is given as JSON, or as the path of a file of JSON. Raises BadInput, one line."""
    from tailrace.lab.fuzz.engine.grammar import WAYS

    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(
            f"--request {text[:60]!r}: {error}; give JSON as a failure prints it, or a file of it"
        ) from error
    if not isinstance(value, dict) or value.get("way") not in WAYS or not isinstance(value.get("message"), dict):
        raise BadInput(f"--request {text[:60]!r}: give `way` ({', '.join(WAYS)}) and `message`, an object")
    return value


def _described(result: dict) -> str:
    fates = [f"{fate['state']} after {fate['seconds']:.2f} s: {fate['reason']}" for fate in result["fates"]]
    return "\n".join([*fates, *(f"{kind}: {text}" for kind, text, _ in result["problems"])] or ["nothing came back"])


def _lines(values: dict) -> str:
    lines = [
        f"seed {values['seed']}: {values['rounds']} rounds, {values['requests']} requests, {values['mates']} mates",
        "; ".join(f"{count} {state}" for state, count in values["fates"].items()),
        f"engines lost {values['engines_lost']}, hangs {values['hangs']}, unlike mates {values['mates_that_differ']}",
    ]
    for kind, slow in values["slowest_s"].items():
        lines.append(f"slowest {kind}: {slow['seconds']} s {slow['reason']}")
    lines.append(f"memory {values['rss_mb']:.0f} MB, grown by {values['grown_mb']:.0f} MB")
    for one in values["findings"]:
        lines.append(f"{one['kind']} ({one['count']} times): {one['problem']}\n  {one['command']}")
    return "\n".join(lines)
