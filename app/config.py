"""`serve.yaml` as a strict model: Serve itself ignores unknown keys, so a typo must be found here.

Invariant: a file that loads has no unknown key anywhere, and every value is in range. Errors are BadInput, one line,
with the dotted key. Called by every command that starts or reaches the service, and by `app.build`.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tailrace.app.deployment_settings import (
    SETTINGS,
    CoordinatorSettings,
    DeploymentSettings,
    StrictModel,
    UserConfig,
)
from tailrace.app.errors import BadInput
from tailrace.app.file_form import OURS, refuse_constants, refuse_old
from tailrace.app.gateway.gateway_config import GATEWAY, GatewayApplication
from tailrace.app.strict_yaml import read_yaml
from tailrace.deployments.context.context_config import ContextConfig, plain_folder
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.keyed_error import KeyedError
from tailrace.deployments.replica_count import ReplicaCount, fixed
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.policies.families.ordering import GroupStatic
from tailrace.policies.families.registry import Policies, name_of, unknown_key

DEFAULT_CONFIG = Path(__file__).parent.parent / "serve.yaml"
ELASTIC_CONFIG = DEFAULT_CONFIG.with_name("serve.elastic.yaml")


class AppArgs(StrictModel):
    """Arguments of the application builder: `applications[0].args`."""

    replicas: ReplicaCount = Field(
        fixed(2), description="engine replicas: a number, or {min: 1, max: 2} between which policies.tail decides"
    )
    engine: EngineConfig = Field(EngineConfig(model="demo"), description="one engine, the same on every replica")
    pool: PoolConfig | None = Field(PoolConfig(), description="the KV pool; null: every move recomputes")
    context: ContextConfig | None = Field(
        ContextConfig(), description="the group context; null: an engine drafts from its own samples"
    )
    token_log_dir: str | None = Field(
        None,
        description="absolute folder, the same on every node, for tokens of earlier weights; null: they are lost with "
        "the coordinator, and made again under the present weights",
    )
    drafter: DrafterConfig | None = Field(None, description="a draft model on replicas of its own; null: none")

    allow_no_token: bool = Field(False, description="start also where Ray's token mode is off: a closed network alone")

    _plain = field_validator("token_log_dir")(plain_folder)

    @property
    def drafters(self) -> int:
        """Returns the maximum number of running draft models."""
        return 0 if self.drafter is None else self.drafter.replicas.max

    @model_validator(mode="after")
    def _drafts(self):
        method = self.engine.draft.method
        if self.drafter is not None and method not in ("group", "model"):
            raise ValueError(f"drafter: engine.draft.method is {method}; a draft model needs group or model")
        if self.drafter is None and method == "model":
            raise ValueError("engine.draft.method is model, but drafter is null: name a draft model there")
        if self.drafter is not None and self.drafter.replicas.come_and_go and not self.replicas.come_and_go:
            raise ValueError("drafter.replicas has two limits: give `replicas` two as well, such as {min: 1, max: 2}")
        if self.drafter is not None and self.drafter.replicas.min > 0 and self.drafter.replicas.come_and_go:
            raise ValueError("drafter.replicas: give {min: 0, max: N}: the tail policy may end all of them")
        return self


class FileArgs(AppArgs):
    """The same from a file that Serve has read: a constant is refused."""

    @model_validator(mode="before")
    @classmethod
    def _keys_alone(cls, data: Any) -> Any:
        refuse_constants(AppArgs, data)
        return data


def _settings(name: str, item: Any) -> DeploymentSettings:
    """Returns a deployment's settings. Raises KeyedError, whose key begins with the deployment's name."""
    try:
        refuse_constants(SETTINGS[name], item)
        return SETTINGS[name].model_validate(item)
    except KeyedError as error:
        raise KeyedError(f"{name}.{error.key}", error.message) from error
    except ValidationError as error:
        key, message = key_and_message(error, SETTINGS[name])
        raise KeyedError(f"{name}.{key}" if key else name, message) from error


class OtherApplication(BaseModel):
    """Another application in the same file. All its keys are passed to Serve unchanged."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str
    import_path: str


class Application(StrictModel):
    name: str = Field("tailrace", description="name of the service, by which drivers find it")
    import_path: Literal["tailrace.app.build:build"] = Field(OURS, description="what Serve builds: always this")
    route_prefix: None = Field(None, description="null: the service has no HTTP route; Serve's own default is /")
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description="Ray's runtime environment of all replicas, such as env_vars"
    )
    args: AppArgs = Field(AppArgs(), description="what the service is made of")
    deployments: tuple[CoordinatorSettings | DeploymentSettings, ...] = Field(
        (), description="what may change without a restart, and Ray's resources"
    )

    @field_validator("args", mode="before")
    @classmethod
    def _of_a_file(cls, value: Any) -> Any:
        refuse_constants(AppArgs, value)
        return value

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
    def _tail_fits(self):
        """Checks that the tail policy and the ordering fit the number of replicas."""
        policies, replicas = self.policies, self.args.replicas
        if not replicas.come_and_go and getattr(policies.tail, "changes_replicas", True):
            mend = "write `replicas: {min: 1, max: 2}` under args"
            raise ValueError(f"policies.tail {name_of(policies.tail)} needs replicas that come and go: {mend}")
        if replicas.come_and_go and isinstance(policies.ordering, GroupStatic):
            raise ValueError("policies.ordering group_static binds groups to the replicas of the moment: take another")
        return self

    @model_validator(mode="after")
    def _has_drafter(self):
        drafter, policies = self.args.drafter, self.policies
        if drafter is None and any(settings.name == "Drafter" for settings in self.deployments):
            raise ValueError("deployments: Drafter has settings, but args.drafter is null: name a draft model there")
        planned = getattr(policies.draft_models, "needs_drafter", False)
        if planned and drafter is None:
            named = name_of(policies.draft_models)
            raise ValueError(f"policies.draft_models {named} needs args.drafter: name a draft model there")
        tail = policies.tail
        asks = getattr(tail, "wants_drafters", False) or (planned and getattr(tail, "may_want_drafters", False))
        if asks and (drafter is None or not drafter.replicas.come_and_go):
            what = f"policies.tail {name_of(tail)}"
            raise ValueError(f"{what} needs args.drafter, with `replicas: {{min: 0, max: 1}}` there")
        return self

    @model_validator(mode="after")
    def _keeps_its_gpus(self):
        given = self.of("Engine").ray_actor_options
        if given is not None and self.args.engine.device == "gpu" and "num_gpus" not in given:
            mend = f"add num_gpus: {self.args.engine.tensor_parallel}; they take the place of all that args say"
            raise ValueError(f"deployments.Engine.ray_actor_options: {mend}")
        return self

    def of(self, name: Literal["Coordinator", "Engine", "Drafter"]):
        """Returns the settings of one deployment, with defaults if the file has none."""
        return next((d for d in self.deployments if d.name == name), SETTINGS[name](name=name))

    @property
    def user_config(self) -> UserConfig:
        """Returns the settings that may change without a restart."""
        return self.of("Coordinator").user_config

    @property
    def policies(self) -> Policies:
        """Returns the configured policies, for the sizes of this service."""
        return self.user_config.policies.sized(self.args.engine.block_tokens, self.args.drafters)

    def with_args(self, **changes: Any) -> "Application":
        """Returns the application with other arguments."""
        return self.model_copy(update={"args": self.args.model_copy(update=changes)})

    def with_user_config(self, config: UserConfig) -> "Application":
        """Returns the application with another configuration of its coordinator."""
        coordinator = self.of("Coordinator").model_copy(update={"user_config": config})
        others = tuple(one for one in self.deployments if one.name != "Coordinator")
        return self.model_copy(update={"deployments": (coordinator, *others)})


class ServeFile(StrictModel):
    """A whole `serve.yaml`: Tailrace, its gateway for HTTP, and other applications if there are any."""

    proxy_location: Literal["Disabled"] = Field(
        "Disabled", description="Serve's proxy, which nothing needs: drivers use handles, a gateway has its own port"
    )
    applications: tuple[Application | GatewayApplication | OtherApplication, ...] = Field(
        (Application(),), min_length=1, description="the service, its gateway if there is one, and others"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_old_key(cls, data: Any) -> Any:
        refuse_old(data)
        return data

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
    def _same_service(self):
        if self.gateway is not None and self.gateway.args.app_name != self.application.name:
            asked = self.gateway.args.app_name
            raise ValueError(f"gateway: args.app_name is {asked!r}; the service here is {self.application.name!r}")
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
            return f"{key}.{inner.key}".lstrip("."), inner.message
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
    engine, context = application.args.engine.model_copy(update=changes), application.args.context
    if context is not None:
        context = context.model_copy(update={"history_dir": None})
    return file.model_copy(update={"applications": (application.with_args(engine=engine, context=context),)})
