"""Writes docs/configuration.md from the pydantic models of the configuration file and of the policies."""

import json
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from tailrace.app.commands.policies import catalogue
from tailrace.app.config import AppArgs, Application, ServeFile
from tailrace.app.deployment_settings import CoordinatorSettings, UserConfig
from tailrace.app.gateway.gateway_config import GatewayApplication, GatewayConfig
from tailrace.deployments.batches.quotas import Quotas
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.replica_count import Replicas
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.policies.families.registry import FAMILIES, Policies, members
from tailrace.policies.protocol.file_keys import keys_of

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

SECTIONS = (
    ("The file", "", ServeFile),
    ("The service", "applications.", Application),
    ("Its arguments", "applications.args.", AppArgs),
    ("Engines", "applications.args.engine.", EngineConfig),
    ("Drafts", "applications.args.engine.draft.", DraftConfig),
    ("KV pool", "applications.args.pool.", PoolConfig),
    ("Group context", "applications.args.context.", ContextConfig),
    ("Draft model", "applications.args.drafter.", DrafterConfig),
    ("Deployments", "applications.deployments.", CoordinatorSettings),
    ("What may change without a restart", "applications.deployments.user_config.", UserConfig),
    ("Policies", "applications.deployments.user_config.policies.", Policies),
    ("Quotas", "applications.deployments.user_config.quotas.", Quotas),
    ("The gateway", "applications.", GatewayApplication),
    ("Its arguments, gateway", "applications.args.", GatewayConfig),
)
"""Title, prefix of the keys, and model of each table."""


def cell(text: str) -> str:
    """Returns text as a cell of a Markdown table can hold it."""
    return " ".join(str(text).split()).replace("|", "\\|")


def type_name(annotation) -> str:
    """Returns the name of a type as a reader expects it, without modules."""
    if isinstance(annotation, type) and not get_args(annotation):
        return {"NoneType": "null"}.get(annotation.__name__, annotation.__name__)
    text = str(annotation).replace("typing.", "").replace("None", "null")
    for model in models_in(annotation):
        text = text.replace(f"{model.__module__}.{model.__qualname__}", model.__name__)
    return text


def models_in(annotation) -> list[type[BaseModel]]:
    """Returns the models that a type is made of."""
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in get_args(annotation) for model in models_in(part)]


def is_section(annotation) -> bool:
    """Returns whether a key holds other keys. Such a key has no row of its own; a number of replicas has one, since it
    may also be a number.
    """
    return any(model is not Replicas for model in models_in(annotation))


def default(field) -> str:
    if field.default_factory is not None:
        return "empty" if field.default_factory in (dict, tuple) else "by device"
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, Replicas):
        least, most = field.default.min, field.default.max
        return f"`{most}`" if least == most else f"`{{min: {least}, max: {most}}}`"
    return f"`{json.dumps(to_jsonable_python(field.default))}`"


def table(prefix: str, model: type[BaseModel]) -> dict[str, tuple[str, str, str]]:
    """Returns type, default and meaning of each key of a model that holds no other keys. `Policies` has a key for each
    family.
    """
    if model is Policies:
        usual = Policies.model_fields
        return {
            f"{prefix}{family}": ("name or mapping", f"`{usual[family].default.type}`", about)
            for family, about in FAMILY_MEANINGS.items()
        }
    rows = {}
    for name in keys_of(model):
        field = model.model_fields[name]
        if field.annotation is Replicas:
            rows[f"{prefix}{name}"] = ("int or {min, max}", default(field), field.description)
            for limit, of in Replicas.model_fields.items():
                rows[f"{prefix}{name}.{limit}"] = ("int", default(of), of.description)
        elif not is_section(field.annotation):
            rows[f"{prefix}{name}"] = (type_name(field.annotation), default(field), field.description or "")
    return rows


FAMILY_MEANINGS = {
    "ordering": "which sample runs next",
    "placement": "on which replica",
    "chunking": "how much of it at once",
    "kv_on_update": "which KV is read after new weights",
    "lengths": "how long an answer is expected to get",
    "drafting": "how many draft tokens a sample gets in a step",
    "draft_models": "how a draft model drafts for a sample",
    "tail": "how many replicas stay as the batch shrinks",
    "racing": "which samples run twice, with another draft method",
    "lanes": "which samples share a replica, by what is known of their lengths",
    "trajectories": "which samples of several turns are active, and keep their KV between turns",
}


def keys() -> dict[str, dict[str, tuple[str, str, str]]]:
    """Returns the keys of the file by the title of their section. Keys of a gateway's application that the service's
    application has too are listed once.
    """
    found, seen = {}, set()
    for title, prefix, model in SECTIONS:
        rows = table(prefix, model)
        found[title] = {key: row for key, row in rows.items() if key not in seen or title == "Its arguments, gateway"}
        seen |= rows.keys()
    return {title: rows for title, rows in found.items() if rows}


def knobs() -> list[tuple[str, str, str]]:
    """Returns family, member and name of each knob of a policy that the file may set."""
    return [
        (family, name, knob)
        for family in keys_of(Policies)
        for name, member in members(family).items()
        for knob in keys_of(member)
        if knob != "type"
    ]


def constants() -> dict[str, tuple[str, str]]:
    """Returns default and meaning of each field that only code may set, by class and name."""
    models = [model for _, _, model in SECTIONS if model is not Policies]
    models += [member for family in FAMILIES for member in members(family).values()]
    return {
        f"{model.__name__}.{name}": (default(field), field.description or "")
        for model in models
        for name, field in model.model_fields.items()
        if name not in keys_of(model)
    }


def counts(sections: dict) -> list[str]:
    """Returns a table of the number of keys of each section, and of policies' knobs. `replicas` counts by its longer
    form, as `min` and `max`.
    """
    numbers = {title: sum(f"{key}.min" not in rows for key in rows) for title, rows in sections.items()}
    rows = [f"| {title} | {number} |" for title, number in numbers.items()]
    rows += [f"| all | {sum(numbers.values())} |", f"| knobs of policies | {len(knobs())} |"]
    return ["| section | keys |", "|---|---|", *rows, ""]


def page() -> str:
    """Returns the whole page."""
    sections = keys()
    parts = ["# Configuration", "", *ABOUT_KEYS, "", *counts(sections)]
    for title, rows in sections.items():
        parts += [f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        parts += [f"| `{key}` | `{cell(of[0])}` | {cell(of[1])} | {cell(of[2])} |" for key, of in rows.items()]
        parts.append("")
        if title == "Policies":
            parts += policies()
    parts += ["## Constants", "", *ABOUT_CONSTANTS, "", "| field | value | meaning |", "|---|---|---|"]
    parts += [f"| `{name}` | {cell(of)} | {cell(about)} |" for name, (of, about) in constants().items()]
    return "\n".join(parts).rstrip() + "\n"


ABOUT_KEYS = (
    "Generated by `scripts/configuration_reference.py` from the models that check `serve.yaml`. Unknown keys are",
    "errors, and so are keys of older versions: the line says what to write instead. `tailrace schema` prints the",
    "JSON schema. `vllm_args`, `runtime_env` and `ray_actor_options` are passed on to vLLM and Ray, and other",
    "applications of a file to Serve. What may change without a restart is in `user_config` of the Coordinator; a",
    "change of `args` restarts the application. The table counts every key that holds no others; `replicas`",
    "counts by its longer form.",
)

ABOUT_CONSTANTS = (
    "Values that no file sets; their evidence is in `docs/measurements` or beside them. Code may set them: a driver",
    "those of policies, by `set_policies`; a program that deploys by `tailrace.app.build.build_from_file` all.",
)


def policies() -> list[str]:
    """Returns a table of the members of each family, with their knobs."""
    parts = ["| family | member | knob | default | meaning |", "|---|---|---|---|---|"]
    for family, named in catalogue().items():
        for name, member in named.items():
            parts.append(f"| {family} | `{name}` | | | {cell(member['about'])} |")
            for knob, field in member["knobs"].items():
                about = cell(field["about"] or "")
                parts.append(f"| {family} | `{name}` | `{knob}` | `{cell(json.dumps(field['default']))}` | {about} |")
    return [*parts, ""]


if __name__ == "__main__":
    PAGE.write_text(page())
