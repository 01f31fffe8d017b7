"""`serve.yaml` as a strict model: Serve itself ignores what it does not know, so a typo must end here.

Invariant: a file that loads has no unknown key anywhere, and every value is in range. Errors are BadInput, one line,
with the dotted key. Called by every command that starts or reaches the service, and by `app.build`.
"""

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.errors import BadInput
from deployments.context.config import ContextConfig
from deployments.engine.config import EngineConfig
from kvpool.config import PoolConfig
from policies.bundle import Policies

DEFAULT_CONFIG = Path(__file__).parent.parent / "serve.yaml"


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AppArgs(Strict):
    """What the application builder takes: `applications[0].args`."""

    engine: EngineConfig = EngineConfig(model="demo")
    pool: PoolConfig | None = Field(PoolConfig(), description="null: every move recomputes")
    context: ContextConfig | None = Field(ContextConfig(), description="null: an engine drafts from its own samples")


class UserConfig(Strict):
    """What may change without a restart."""

    policies: Policies = Policies()


class ActorOptions(Strict):
    num_cpus: float | None = Field(None, ge=0)
    num_gpus: float | None = Field(None, ge=0)
    resources: dict[str, float] | None = None
    runtime_env: dict[str, Any] | None = None


class CoordinatorSettings(Strict):
    name: Literal["Coordinator"]
    ray_actor_options: ActorOptions = ActorOptions(num_cpus=0)
    user_config: UserConfig = UserConfig()


class EngineSettings(Strict):
    name: Literal["Engine"]
    num_replicas: int = Field(2, ge=1)
    ray_actor_options: ActorOptions = ActorOptions(num_cpus=1)
    graceful_shutdown_timeout_s: float = Field(20, ge=0)
    health_check_period_s: float = Field(2, gt=0)
    health_check_timeout_s: float = Field(30, gt=0)


class Application(Strict):
    name: str = "tailrace"
    import_path: Literal["app.build:build"] = "app.build:build"
    route_prefix: None = None
    runtime_env: dict[str, Any] = {}
    args: AppArgs = AppArgs()
    deployments: tuple[CoordinatorSettings | EngineSettings, ...] = ()

    @field_validator("deployments", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """Pick each deployment's model by its name, so that errors speak of the one that was meant."""
        known = {"Coordinator": CoordinatorSettings, "Engine": EngineSettings}
        names = [item.get("name") if isinstance(item, dict) else item.name for item in value]
        for name in names:
            if name not in known:
                raise ValueError(f"no deployment is called {name!r}; known: {', '.join(known)}")
        if len(set(names)) < len(names):
            raise ValueError("a deployment is named twice")
        return tuple(known[name].model_validate(item) for name, item in zip(names, value, strict=True))

    def of(self, name: Literal["Coordinator", "Engine"]) -> CoordinatorSettings | EngineSettings:
        """The settings of one deployment, the defaults where the file has none."""
        defaults = {"Coordinator": CoordinatorSettings, "Engine": EngineSettings}[name](name=name)
        return next((d for d in self.deployments if d.name == name), defaults)


class HttpOptions(Strict):
    host: Literal["127.0.0.1"] = "127.0.0.1"


class ServeFile(Strict):
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
