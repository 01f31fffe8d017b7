"""`serve.yaml` as a strict model: Serve itself ignores what it does not know, so a typo must end here.

Invariant: a file that loads has no unknown key anywhere, and every value is in range. Errors are BadInput, one line,
with the dotted key. Called by every command that starts or reaches the service, and by `app.build`.
"""

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tailrace.app.errors import BadInput
from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.drafter.config import DrafterConfig
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.config import PoolConfig
from tailrace.policies.families.draft_models import Planned
from tailrace.policies.families.ordering import GroupStatic
from tailrace.policies.families.registry import Policies, name_of
from tailrace.policies.families.tail import Auto, Draft, Hold

DEFAULT_CONFIG = Path(__file__).parent.parent / "serve.yaml"
ELASTIC_CONFIG = DEFAULT_CONFIG.with_name("serve.elastic.yaml")


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AppArgs(StrictModel):
    """What the application builder takes: `applications[0].args`."""

    engine: EngineConfig = EngineConfig(model="demo")
    pool: PoolConfig | None = Field(PoolConfig(), description="null: every move recomputes")
    context: ContextConfig | None = Field(ContextConfig(), description="null: an engine drafts from its own samples")
    drafter: DrafterConfig | None = Field(None, description="a draft model on replicas of its own; null: none")

    @model_validator(mode="after")
    def _drafts(self):
        method = self.engine.draft.method
        if self.drafter is not None and not self.engine.draft.is_ours:
            raise ValueError(f"drafter: engine.draft.method is {method}; a draft model needs group or model")
        if self.drafter is None and method == "model":
            raise ValueError("engine.draft.method is model, but drafter is null: name a draft model there")
        return self


class ReplicaLimits(StrictModel):
    """Engine replicas that there may be; how many there are, `policies.tail` decides."""

    least: int = Field(ge=0)
    most: int = Field(ge=1)


class UserConfig(StrictModel):
    """What may change without a restart."""

    policies: Policies = Policies()
    replicas: ReplicaLimits | None = Field(None, description="null: as many as Engine.num_replicas, always")


class Autoscaling(StrictModel):
    """Serve's own keys. None has a default: with Serve's defaults it would react in half a minute."""

    min_replicas: int = Field(ge=0)
    max_replicas: int = Field(ge=1)
    initial_replicas: int | None = Field(None, ge=0)
    upscale_delay_s: Literal[0]
    downscale_delay_s: Literal[0]
    metrics_interval_s: float = Field(gt=0, le=1)
    look_back_period_s: float = Field(gt=0, le=5)


class AutoscalingPolicy(StrictModel):
    policy_function: Literal["tailrace.deployments.autoscaler:AsCoordinated"]


class ActorOptions(StrictModel):
    num_cpus: float | None = Field(None, ge=0)
    num_gpus: float | None = Field(None, ge=0)
    resources: dict[str, float] | None = None
    runtime_env: dict[str, Any] | None = None


class CoordinatorSettings(StrictModel):
    name: Literal["Coordinator"]
    ray_actor_options: ActorOptions = ActorOptions(num_cpus=0)
    autoscaling_config: Autoscaling | None = Field(None, description="one replica; that it reports to Serve")
    user_config: UserConfig = UserConfig()


class EngineSettings(StrictModel):
    name: Literal["Engine"]
    num_replicas: int | None = Field(None, ge=1, description="null: 2, or as autoscaling says")
    autoscaling_config: Autoscaling | None = None
    ray_actor_options: ActorOptions = ActorOptions(num_cpus=1)
    graceful_shutdown_timeout_s: float = Field(20, ge=0)
    health_check_period_s: float = Field(2, gt=0)
    health_check_timeout_s: float = Field(30, gt=0)

    @property
    def most_replicas(self) -> int:
        return self.autoscaling_config.max_replicas if self.autoscaling_config else self.num_replicas

    @model_validator(mode="before")
    @classmethod
    def _count(cls, data: Any) -> Any:
        return counted(data, 2)


def counted(data: Any, replicas: int) -> Any:
    """Settings with this many replicas, where they say neither a number nor autoscaling."""
    if isinstance(data, dict) and data.get("autoscaling_config") is None and data.get("num_replicas") is None:
        return {**data, "num_replicas": replicas}
    return data


class DrafterSettings(StrictModel):
    name: Literal["Drafter"]
    num_replicas: int | None = Field(None, ge=1, description="null: 1, or as autoscaling says")
    autoscaling_config: Autoscaling | None = Field(None, description="none, and up to so many where `tail: draft` says")
    ray_actor_options: ActorOptions = ActorOptions(num_cpus=1)
    graceful_shutdown_timeout_s: float = Field(5, ge=0)
    health_check_period_s: float = Field(2, gt=0)
    health_check_timeout_s: float = Field(30, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _count(cls, data: Any) -> Any:
        return counted(data, 1)


SETTINGS = {"Coordinator": CoordinatorSettings, "Engine": EngineSettings, "Drafter": DrafterSettings}


class Application(StrictModel):
    name: str = "tailrace"
    import_path: Literal["tailrace.app.build:build"] = "tailrace.app.build:build"
    route_prefix: None = None
    runtime_env: dict[str, Any] = {}
    autoscaling_policy: AutoscalingPolicy | None = None
    args: AppArgs = AppArgs()
    deployments: tuple[CoordinatorSettings | EngineSettings | DrafterSettings, ...] = ()

    @field_validator("deployments", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Pick each deployment's model by its name, so that errors speak of the one that was meant."""
        names = [item.get("name") if isinstance(item, dict) else item.name for item in value]
        for name in names:
            if name not in SETTINGS:
                raise ValueError(f"no deployment is called {name!r}; known: {', '.join(SETTINGS)}")
        if len(set(names)) < len(names):
            raise ValueError("a deployment is named twice")
        return tuple(SETTINGS[name].model_validate(item) for name, item in zip(names, value, strict=True))

    @model_validator(mode="after")
    def _elastic(self):
        """Autoscaling is there with all its parts, which agree, or not at all."""
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
        if missing and not isinstance(tail, Hold):
            raise ValueError(f"policies.tail {name_of(tail)} needs replicas that come and go: see serve.elastic.yaml")
        if missing:
            return self
        if isinstance(coordinator.user_config.policies.ordering, GroupStatic):
            raise ValueError("policies.ordering group_static binds groups to the replicas of the moment: take another")
        if engine.num_replicas is not None:
            raise ValueError("Engine.num_replicas is fixed, Engine.autoscaling_config is not: remove one of them")
        if (limits.least, limits.most) != (scaling.min_replicas, scaling.max_replicas):
            raise ValueError("Coordinator.user_config.replicas must be Engine's min_replicas and max_replicas")
        if (coordinator.autoscaling_config.min_replicas, coordinator.autoscaling_config.max_replicas) != (1, 1):
            raise ValueError("Coordinator.autoscaling_config: min_replicas and max_replicas must be 1: there is one")
        return self

    @model_validator(mode="after")
    def _has_drafter(self):
        if self.args.drafter is None and any(settings.name == "Drafter" for settings in self.deployments):
            raise ValueError("deployments: Drafter has settings, but args.drafter is null: name a draft model there")
        drafter, policies = self.of("Drafter"), self.of("Coordinator").user_config.policies
        planned = isinstance(policies.draft_models, Planned)
        if planned and self.args.drafter is None:
            raise ValueError("policies.draft_models planned needs args.drafter: name a draft model there")
        asks = isinstance(policies.tail, Draft) or (planned and isinstance(policies.tail, Auto))
        if asks and drafter.autoscaling_config is None:
            what = f"policies.tail {policies.tail.type}"
            raise ValueError(f"{what} needs args.drafter, and Drafter.autoscaling_config from 0 replicas up")
        if drafter.autoscaling_config is not None:
            if self.autoscaling_policy is None:
                raise ValueError("Drafter.autoscaling_config needs replicas that come and go: see serve.elastic.yaml")
            if drafter.num_replicas is not None:
                raise ValueError("Drafter.num_replicas is fixed, Drafter.autoscaling_config is not: remove one of them")
        return self

    def of(self, name: Literal["Coordinator", "Engine", "Drafter"]):
        """The settings of one deployment, the defaults where the file has none."""
        return next((d for d in self.deployments if d.name == name), SETTINGS[name](name=name))


class HttpOptions(StrictModel):
    host: Literal["127.0.0.1"] = "127.0.0.1"


class ServeFile(StrictModel):
    """A whole `serve.yaml`. HTTP is off: drivers use Python handles."""

    proxy_location: Literal["Disabled"] = "Disabled"
    http_options: HttpOptions = HttpOptions()
    applications: tuple[Application, ...] = Field((Application(),), min_length=1, max_length=1)

    @property
    def application(self) -> Application:
        return self.applications[0]


def otlp_wanted() -> bool:
    """Whether the standard OpenTelemetry variables name a collector for traces."""
    return any(os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def load_config(path: Path = DEFAULT_CONFIG) -> ServeFile:
    """Read and check a configuration file. Raises BadInput that names file and key."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}; give an existing file with --config") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise BadInput(f"{path}{where}: not YAML: {getattr(error, 'problem', error)}") from error
    try:
        return ServeFile.model_validate(data or {})
    except ValidationError as error:
        raise BadInput(f"{path}: {first_error(error)}") from error


def first_error(error: ValidationError) -> str:
    """The first of a model's complaints as one line: dotted key, what is wrong, how to mend it."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "file"
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key; remove it or correct its spelling"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}"
    return f"{key}: {first['msg']} (got {first['input']!r})"[:300]
