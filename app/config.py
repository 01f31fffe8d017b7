"""`serve.yaml` as a strict model: Serve itself ignores unknown keys, so a typo must be found here.

Invariant: a file that loads has no unknown key anywhere, and every value is in range. Errors are BadInput, one line,
with the dotted key. Called by every command that starts or reaches the service, and by `app.build`.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tailrace.app.deployment_settings import (
    SETTINGS,
    AutoscalingPolicy,
    CoordinatorSettings,
    DrafterSettings,
    EngineSettings,
    StrictModel,
)
from tailrace.app.errors import BadInput
from tailrace.app.gateway.config import GATEWAY, GatewayApplication, HttpOptions, check_doors
from tailrace.app.strict_yaml import read_yaml
from tailrace.deployments.context.config import ContextConfig, plain_folder
from tailrace.deployments.drafter.config import DrafterConfig
from tailrace.deployments.keyed_error import KeyedError
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.config import PoolConfig
from tailrace.policies.families.ordering import GroupStatic
from tailrace.policies.families.registry import name_of, unknown_key

DEFAULT_CONFIG = Path(__file__).parent.parent / "serve.yaml"
ELASTIC_CONFIG = DEFAULT_CONFIG.with_name("serve.elastic.yaml")


class AppArgs(StrictModel):
    """Arguments of the application builder: `applications[0].args`."""

    engine: EngineConfig = EngineConfig(model="demo")
    pool: PoolConfig | None = Field(PoolConfig(), description="null: every move recomputes")
    context: ContextConfig | None = Field(ContextConfig(), description="null: an engine drafts from its own samples")
    token_log_dir: str | None = Field(
        None,
        description="absolute folder, the same on every node, for tokens of earlier weights; null: they are lost with "
        "the coordinator, and made again under the present weights",
    )
    drafter: DrafterConfig | None = Field(None, description="a draft model on replicas of its own; null: none")

    allow_no_token: bool = Field(False, description="start also where Ray's token mode is off: a closed network alone")

    _plain = field_validator("token_log_dir")(plain_folder)

    @model_validator(mode="after")
    def _drafts(self):
        method = self.engine.draft.method
        if self.drafter is not None and not self.engine.draft.is_ours:
            raise ValueError(f"drafter: engine.draft.method is {method}; a draft model needs group or model")
        if self.drafter is None and method == "model":
            raise ValueError("engine.draft.method is model, but drafter is null: name a draft model there")
        return self


def _settings(name: str, item: Any) -> CoordinatorSettings | EngineSettings | DrafterSettings:
    """Returns a deployment's settings. Raises KeyedError, whose key begins with the deployment's name."""
    try:
        return SETTINGS[name].model_validate(item)
    except ValidationError as error:
        key, message = key_and_message(error, SETTINGS[name])
        raise KeyedError(f"{name}.{key}" if key else name, message) from error


OURS = "tailrace.app.build:build"


class OtherApplication(BaseModel):
    """Another application in the same file. All its keys are passed to Serve unchanged."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str
    import_path: str


class Application(StrictModel):
    name: str = "tailrace"
    import_path: Literal["tailrace.app.build:build"] = "tailrace.app.build:build"
    route_prefix: None = None
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    autoscaling_policy: AutoscalingPolicy | None = None
    logging_config: dict[str, Any] | None = None
    args: AppArgs = AppArgs()
    deployments: tuple[CoordinatorSettings | EngineSettings | DrafterSettings, ...] = ()

    @field_validator("deployments", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Selects each deployment's model by its name, so that errors concern the intended one."""
        if not isinstance(value, list | tuple) or not all(isinstance(item, dict | BaseModel) for item in value):
            raise ValueError("give a list of deployments, each with its keys, such as [{name: Engine}]")
        names = [item.get("name") if isinstance(item, dict) else item.name for item in value]
        for name in names:
            if not isinstance(name, str) or name not in SETTINGS:
                raise ValueError(f"no deployment is called {name!r}; known: {', '.join(SETTINGS)}")
        if len(set(names)) < len(names):
            raise ValueError("a deployment is named twice")
        return tuple(_settings(name, item) for name, item in zip(names, value, strict=True))

    @model_validator(mode="after")
    def _elastic(self):
        """Checks autoscaling: all its parts are given and agree, or none is given."""
        coordinator, engine = self.of("Coordinator"), self.of("Engine")
        limits, scaling = coordinator.user_config.replicas, engine.autoscaling_config
        parts = {
            "autoscaling_policy": self.autoscaling_policy,
            "Engine.autoscaling_config": scaling,
            "Coordinator.autoscaling_config": coordinator.autoscaling_config,
            "Coordinator.user_config.replicas": limits,
        }
        missing = [name for name, part in parts.items() if part is None]
        if missing and len(missing) < len(parts):
            raise ValueError(f"replicas that come and go need {', '.join(missing)} too; serve.elastic.yaml shows it")
        tail = coordinator.user_config.policies.tail
        if missing and getattr(tail, "changes_replicas", True):
            raise ValueError(f"policies.tail {name_of(tail)} needs replicas that come and go: see serve.elastic.yaml")
        if missing:
            return self
        if isinstance(coordinator.user_config.policies.ordering, GroupStatic):
            raise ValueError("policies.ordering group_static binds groups to the replicas of the moment: take another")
        if engine.num_replicas is not None:
            raise ValueError("Engine.num_replicas is fixed, Engine.autoscaling_config is not: remove one of them")
        if (limits.min, limits.max) != (scaling.min_replicas, scaling.max_replicas):
            raise ValueError("Coordinator.user_config.replicas must be Engine's min_replicas and max_replicas")
        if (coordinator.autoscaling_config.min_replicas, coordinator.autoscaling_config.max_replicas) != (1, 1):
            raise ValueError("Coordinator.autoscaling_config: min_replicas and max_replicas must be 1: there is one")
        return self

    @model_validator(mode="after")
    def _has_drafter(self):
        if self.args.drafter is None and any(settings.name == "Drafter" for settings in self.deployments):
            raise ValueError("deployments: Drafter has settings, but args.drafter is null: name a draft model there")
        drafter, policies = self.of("Drafter"), self.of("Coordinator").user_config.policies
        planned = getattr(policies.draft_models, "needs_drafter", False)
        if planned and self.args.drafter is None:
            named = name_of(policies.draft_models)
            raise ValueError(f"policies.draft_models {named} needs args.drafter: name a draft model there")
        tail = policies.tail
        asks = getattr(tail, "wants_drafters", False) or (planned and getattr(tail, "may_want_drafters", False))
        if asks and drafter.autoscaling_config is None:
            what = f"policies.tail {name_of(tail)}"
            raise ValueError(f"{what} needs args.drafter, and Drafter.autoscaling_config from 0 replicas up")
        if drafter.autoscaling_config is not None:
            if self.autoscaling_policy is None:
                raise ValueError("Drafter.autoscaling_config needs replicas that come and go: see serve.elastic.yaml")
            if drafter.num_replicas is not None:
                raise ValueError("Drafter.num_replicas is fixed, Drafter.autoscaling_config is not: remove one of them")
        return self

    def of(self, name: Literal["Coordinator", "Engine", "Drafter"]):
        """Returns the settings of one deployment, with defaults if the file has none."""
        return next((d for d in self.deployments if d.name == name), SETTINGS[name](name=name))


class ServeFile(StrictModel):
    """A whole `serve.yaml`: Tailrace, its gateway for HTTP, and other applications if there are any.

    `proxy_location`: other than Disabled only with a gateway; drivers use Python handles.
    """

    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"] = "Disabled"
    http_options: HttpOptions = HttpOptions()
    grpc_options: dict[str, Any] | None = None
    controller_options: dict[str, Any] | None = None
    logging_config: dict[str, Any] | None = None
    tracing_config: dict[str, Any] | None = None
    target_capacity: float | None = None
    applications: tuple[Application | GatewayApplication | OtherApplication, ...] = Field(
        (Application(),), min_length=1
    )

    @field_validator("applications", mode="before")
    @classmethod
    def _by_import_path(cls, value: Any) -> Any:
        """Selects each application's model by its import_path, so that errors concern the right one."""
        if not isinstance(value, (list, tuple)):
            return value
        found = [_application(place, item) for place, item in enumerate(value)]
        if sum(isinstance(item, Application) for item in found) != 1:
            raise ValueError(f"name exactly one application with import_path {OURS}")
        return tuple(found)

    @model_validator(mode="after")
    def _doors(self):
        check_doors(self.proxy_location, self.http_options, self.gateway, self.application.name)
        return self

    @property
    def gateway(self) -> GatewayApplication | None:
        """Returns the gateway among the applications."""
        return next((item for item in self.applications if isinstance(item, GatewayApplication)), None)

    @property
    def application(self) -> Application:
        """Returns Tailrace's application."""
        return next(item for item in self.applications if isinstance(item, Application))


def _application(place: int, item: Any) -> Application | OtherApplication:
    if isinstance(item, BaseModel):
        return item
    path = item.get("import_path", OURS) if isinstance(item, dict) else OURS
    model = {OURS: Application, GATEWAY: GatewayApplication}.get(path, OtherApplication)
    try:
        return model.model_validate(item)
    except ValidationError as error:
        key, message = key_and_message(error, model)
        raise KeyedError(f"{place}.{key}" if key else str(place), message) from error


def load_config(path: Path = DEFAULT_CONFIG) -> ServeFile:
    """Reads and checks a configuration file. Raises BadInput that names file and key."""
    try:
        data = read_yaml(path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}; give an existing file with --config") from error
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error
    try:
        return ServeFile.model_validate(data or {})
    except ValidationError as error:
        raise BadInput(f"{path}: {first_error(error, ServeFile)}") from error


def key_and_message(error: ValidationError, model: type[BaseModel] | None) -> tuple[str, str]:
    """Returns the first error about a value of `model`: its dotted key, and the fault with its remedy."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return key, unknown_key(model, first["loc"]) if model else "unknown key; remove it or correct its spelling"
    if first["type"] == "value_error":
        inner = first["ctx"]["error"]
        if isinstance(inner, KeyedError):
            return f"{key}.{inner.key}", inner.message
        return key, str(inner)
    return key, f"{first['msg']} (got {first['input']!r})"[:300]


def first_error(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Returns the first of a model's errors as one line: dotted key, fault, remedy."""
    key, message = key_and_message(error, model)
    return f"{key or 'file'}: {message}"


def with_engine(file: ServeFile, changes: dict) -> ServeFile:
    """Returns the configuration with other engine settings, and with history in memory only, so that no stored answers
    are deleted.
    """
    application = file.application
    args = application.args.model_copy(update={"engine": application.args.engine.model_copy(update=changes)})
    if args.context is not None:
        args = args.model_copy(update={"context": args.context.model_copy(update={"history_dir": None})})
    return file.model_copy(update={"applications": (application.model_copy(update={"args": args}),)})
