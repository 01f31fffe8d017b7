"""`tailrace policies`: families of scheduling policies, their members and knobs."""

import json

import click
from pydantic_core import to_jsonable_python

from tailrace.policies.families.registry import FAMILIES, installed, members
from tailrace.policies.protocol.file_keys import keys_of


def catalogue() -> dict:
    """Returns family -> member -> {about, knobs: {name: {default, about}}}."""
    return {
        family: {name: _member(cls) for name, cls in members(family).items()}
        | {name: {"about": f"installed: {path}", "knobs": {}} for name, path in installed(family).items()}
        for family in FAMILIES
    }


def _member(cls) -> dict:
    knobs = {
        name: {"default": to_jsonable_python(field.default), "about": field.description}
        for name, field in cls.model_fields.items()
        if name != "type" and name in keys_of(cls)
    }
    return {"about": cls.__doc__.strip().splitlines()[0], "knobs": knobs}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(as_json):
    """List policy families, their members and knobs.

    Installed packages add members by entry points `FAMILY.NAME` of the group `tailrace.policies`. Any class can be
    named by dotted path: `type: "my_pkg.mine:MyOrdering"`.
    """
    families = catalogue()
    if as_json:
        click.echo(json.dumps(families))
        return
    for family, known in families.items():
        click.echo(family)
        for name, member in known.items():
            click.echo(f"  {name:22} {member['about']}")
            for knob, field in member["knobs"].items():
                click.echo(f"  {'':22}   {knob} = {json.dumps(field['default'])}: {field['about']}")
