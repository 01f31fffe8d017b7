"""The form of a configuration in a file: what it may not have any more, and how a configuration is written as one.

`refuse_old` finds keys that older files have, each with one line that says what to write instead. `refuse_constants`
finds fields that only code may set (`file_keys`). Called by `app.config`, `app.build` and `app.cluster`.
"""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from tailrace.app.gateway.gateway_config import CONVERSATION_TOKENS, GATEWAY
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.keyed_error import KeyedError
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.policies.families.registry import FAMILIES, Policies, members, name_of
from tailrace.policies.protocol.file_keys import keys_of

OURS, IN_CODE = "tailrace.app.build:build", "tailrace.app.build:build_from_code"
"""Builders of the service's application: from a file, and from a configuration that code has made."""

GONE = "no longer a key"

OLD_OF_FILE = {
    "http_options": "write `host` and `port` under the gateway's args, and `proxy_location: Disabled`",
    "grpc_options": "remove it: nothing here listens for gRPC",
    "controller_options": "remove it: Serve's defaults hold",
    "logging_config": "remove it: Serve's defaults hold",
    "tracing_config": "remove it, and set OTEL_EXPORTER_OTLP_ENDPOINT on the nodes: docs/traces.md",
    "target_capacity": "remove it: `args.replicas` is the number of replicas",
}
"""Keys that the top of a file no longer has, with what to do."""

OLD_OF_APPLICATION = {"logging_config": "remove it: Serve's defaults hold"}

OLD_OF_GATEWAY = {
    "deployments": "write `replicas: 2` under args for more replicas",
    "route_prefix": "remove it: the gateway has a port of its own, `port` under args",
}

OLD_OF_GATEWAY_ARGS = {"conversation_tokens": f"remove it: it is fixed at {CONVERSATION_TOKENS}"}

OLD_OF_DEPLOYMENT = dict.fromkeys(
    (
        "max_ongoing_requests", "max_queued_requests", "graceful_shutdown_wait_loop_s", "graceful_shutdown_timeout_s",
        "health_check_period_s", "health_check_timeout_s",
    ),
    "remove it: its value is fixed (app/deployment_options.py)",
) | dict.fromkeys(
    (
        "placement_group_bundles", "placement_group_strategy", "placement_group_bundle_label_selector",
        "max_replicas_per_node", "logging_config", "rolling_update_percentage", "max_surge_percent",
    ),
    "remove it: Serve's defaults hold",
)  # fmt: skip
"""Serve's own keys of a deployment that were passed on to it."""


GONE_FIELDS: dict[type[BaseModel], dict[str, str]] = {
    ContextConfig: dict.fromkeys(
        ("max_shards", "replicas_per_shard", "shrink_after_s"), "remove it: there is one actor for each 64 replicas"
    ),
    DraftConfig: dict.fromkeys(("paths", "fork_running"), "remove it: one path of a draft is verified")
    | {
        f"lookup_{end}": f"write prompt_lookup_{end} in vllm_args.speculative_config, with draft.method vllm"
        for end in ("min", "max")
    },
}
"""Keys of older files whose field no longer exists, by the model that had it."""


def refuse_old(data: Any) -> None:
    """Raises KeyedError for the first key of a file that older files had."""
    if not isinstance(data, dict):
        return
    _refuse(data, OLD_OF_FILE, "")
    applications = data.get("applications")
    for place, application in enumerate(applications if isinstance(applications, list | tuple) else ()):
        if not isinstance(application, dict):
            continue
        at, path = f"applications.{place}", application.get("import_path", OURS)
        if path == OURS:
            _refuse_of_application(application, at)
        elif path == GATEWAY:
            _refuse(application, OLD_OF_APPLICATION | OLD_OF_GATEWAY, at)
            args = application.get("args")
            _refuse(args if isinstance(args, dict) else {}, OLD_OF_GATEWAY_ARGS, f"{at}.args")


def _refuse_of_application(application: dict, at: str) -> None:
    _refuse_blocks(application, at)
    _refuse(application, OLD_OF_APPLICATION, at)
    for one in _deployments_of(application):
        _refuse(one, OLD_OF_DEPLOYMENT | _number_of(one), f"{at}.deployments.{one.get('name')}")
        user_config = one.get("user_config")
        if isinstance(user_config, dict):
            limits = _limits(user_config.get("replicas"), "min", "max")
            mend = f"remove it, and write `replicas: {limits}` under args"
            _refuse(user_config, {"replicas": mend}, f"{at}.deployments.{one.get('name')}.user_config")


def _refuse_blocks(application: dict, at: str) -> None:
    """Refuses the four blocks that said in older files that replicas come and go, in one line about all of them."""
    if "autoscaling_policy" in application:
        named = {one.get("name"): one for one in _deployments_of(application)}
        limits = _limits(named.get("Engine", {}).get("autoscaling_config"), "min_replicas", "max_replicas")
        mend = f"write `replicas: {limits}` under args, and remove it, both autoscaling_config and user_config.replicas"
        raise KeyedError(f"{at}.autoscaling_policy", f"{GONE}; {mend}")


def _deployments_of(application: dict) -> list[dict]:
    found = application.get("deployments")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list | tuple) else []


def _number_of(deployment: dict) -> dict[str, str]:
    """Returns the old keys about the number of replicas, each with the line that says it now."""
    where = {"Engine": "args", "Drafter": "args.drafter"}.get(str(deployment.get("name")))
    if where is None:
        return {
            "num_replicas": "remove it: there is one coordinator",
            "autoscaling_config": "remove it: `args.replicas` alone says that replicas come and go",
        }
    limits = _limits(deployment.get("autoscaling_config"), "min_replicas", "max_replicas")
    number = deployment.get("num_replicas")
    return {
        "num_replicas": f"write `replicas: {number}` under {where}",
        "autoscaling_config": f"write `replicas: {limits}` under {where}",
    }


def _limits(old: Any, least: str, most: str) -> str:
    known = old if isinstance(old, dict) else {}
    return f"{{min: {known.get(least, 1)}, max: {known.get(most, 2)}}}"


def _refuse(data: dict, old: Mapping[str, str], at: str) -> None:
    for key, mend in old.items():
        if key in data:
            raise KeyedError(f"{at}.{key}".lstrip("."), f"{GONE}; {mend}")


def refuse_constants(model: type[BaseModel], data: Any, at: str = "") -> None:
    """Raises KeyedError for the first key in `data`, a mapping for `model`, that only code may set."""
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        field = model.model_fields.get(key) if isinstance(key, str) else None
        place = f"{at}.{key}".lstrip(".")
        if field is None and key in GONE_FIELDS.get(model, {}):
            raise KeyedError(place, f"{GONE}; {GONE_FIELDS[model][key]}")
        if field is None:
            continue  # the model itself refuses it
        if key not in keys_of(model):
            raise KeyedError(place, f"{GONE}; {_fixed(model, key)}")
        for inner in _models_in(field.annotation):
            refuse_constants(inner, value, place)
        if field.annotation is Policies and isinstance(value, dict):
            _refuse_policies(value, place)


def _refuse_policies(policies: dict, at: str) -> None:
    for family, given in policies.items():
        if family not in FAMILIES or isinstance(given, BaseModel):
            continue
        if family not in keys_of(Policies):
            fixed = name_of(Policies.model_fields[family].default)
            raise KeyedError(
                f"{at}.{family}", f"{GONE}; remove it: it is {fixed}, and set_policies of a driver changes it"
            )
        spec = given if isinstance(given, dict) else {"type": given}
        member = members(family).get(str(spec.get("type")))
        if member is not None:
            refuse_constants(member, spec, f"{at}.{family}")


def _fixed(model: type[BaseModel], key: str) -> str:
    """Returns the line about a constant: its value, or where the value comes from."""
    field = model.model_fields[key]
    if key in FOLLOWING:
        return f"remove it: {FOLLOWING[key]}"
    default = to_jsonable_python(field.get_default(call_default_factory=False))
    return f"remove it: it is fixed at {default}"


FOLLOWING = {
    "max_running": "it is 64 on a CPU, and that of the engines on GPUs",
    "max_batched_tokens": "it is 512 on a CPU, and that of the engines on GPUs",
    "kv_cache_gib": "it is 0.5 on a CPU, and that of the engines on GPUs",
    "vllm_args": "the draft model's engine has vLLM's defaults",
    "pull_from_tokens": "KV is pulled where that is faster than computing it",
    "drafter": "it is measured",
    "verifier": "it is measured",
    "block_tokens": "it is 32 on CPUs and 16 on GPUs",
    "index": "the index has its own evidence (docs/drafts.md)",
    "index_mib": "it is 32 for each chunk of max_running, and 512 at least",
    "buffer_mib": "it is 64 on CPUs and 512 on GPUs",
}
"""Constants whose value follows from another key, or is none of one word."""


def _models_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Returns the models that a type is made of, such as `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return () if annotation is Policies else (annotation,)
    return tuple(model for part in get_args(annotation) for model in _models_in(part))


def in_file_form(value: Any) -> Any:
    """Returns a configuration as a file has it: keys alone. Raises ValueError for a constant that code has changed."""
    if isinstance(value, list | tuple):
        return [in_file_form(one) for one in value]
    if not isinstance(value, BaseModel):
        return to_jsonable_python(value)
    model = type(value)
    for name in set(model.model_fields) - set(keys_of(model)):
        if getattr(value, name) != model.model_fields[name].get_default(
            call_default_factory=True, validated_data=value.__dict__
        ):
            raise ValueError(f"{model.__name__}.{name} is set in code; no file can have it")
    if model is Policies:
        return {family: _policy_in_file_form(getattr(value, family)) for family in keys_of(model)}
    found = {name: in_file_form(getattr(value, name)) for name in keys_of(model)}
    return found | {key: to_jsonable_python(one) for key, one in (value.model_extra or {}).items()}


def _policy_in_file_form(policy: BaseModel) -> dict[str, Any]:
    """Returns the mapping that names a policy; a user's own policy with all its fields."""
    name = name_of(policy)
    return {"type": name, "args": policy.model_dump(mode="json")} if ":" in name else in_file_form(policy)
