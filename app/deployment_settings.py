"""The deployments' settings in `serve.yaml`, as strict models: Serve's own keys, and ours in `user_config`.

Invariant: an unknown key is an error; a key of Serve's is passed on unchanged. Used by `app.config` alone.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tailrace.deployments.batches.quotas import Quotas
from tailrace.policies.families.allowed_code import added_code, allow_code
from tailrace.policies.families.registry import Policies


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReplicaLimits(StrictModel):
    """Minimum and maximum number of engine replicas; `policies.tail` decides the number."""

    min: int = Field(ge=0)
    max: int = Field(ge=1)


class UserConfig(StrictModel):
    """Settings that may change without a restart."""

    allowed_code: tuple[str, ...] = Field(
        (),
        validate_default=True,
        description="packages whose policies may be named by dotted path; taking one out needs a restart",
    )
    policies: Policies = Policies()
    quotas: Quotas = Quotas()
    replicas: ReplicaLimits | None = Field(None, description="null: as many as Engine.num_replicas, always")

    @field_validator("allowed_code")
    @classmethod
    def _allow(cls, packages: tuple[str, ...]) -> tuple[str, ...]:
        """Allows the file's packages before its policies are read, with those of the command line."""
        allow_code(*packages)
        return added_code()


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
    """Serve's RayActorOptionsSchema."""

    num_cpus: float | None = Field(None, ge=0)
    num_gpus: float | None = Field(None, ge=0)
    memory: float | None = Field(None, ge=0, description="bytes")
    resources: dict[str, float] | None = None
    accelerator_type: str | None = None
    label_selector: dict[str, str] | None = None
    fallback_strategy: list[dict[str, Any]] | None = None
    runtime_env: dict[str, Any] | None = None


class ServeKeys(StrictModel):
    """Keys of Serve's DeploymentSchema (Ray 2.60) that every deployment accepts and that are passed to Serve as they
    are.

    Not among them: `request_router_config` (calls are addressed by replica id), `gang_scheduling_config`,
    `backpressure_config` and `deployment_actors`.
    """

    max_ongoing_requests: int | None = Field(None, ge=1)
    max_queued_requests: int | None = Field(None, ge=-1)
    graceful_shutdown_wait_loop_s: float | None = Field(None, ge=0)
    placement_group_bundles: list[dict[str, float]] | None = Field(None, description="for engines over several nodes")
    placement_group_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = None
    placement_group_bundle_label_selector: list[dict[str, str]] | None = None
    max_replicas_per_node: int | None = Field(None, ge=1)
    logging_config: dict[str, Any] | None = None
    rolling_update_percentage: float | None = None
    max_surge_percent: int | None = None


class CoordinatorSettings(ServeKeys):
    name: Literal["Coordinator"]
    ray_actor_options: ActorOptions = ActorOptions(num_cpus=0)
    autoscaling_config: Autoscaling | None = Field(None, description="one replica; that it reports to Serve")
    user_config: UserConfig = Field(default_factory=UserConfig)


class EngineSettings(ServeKeys):
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
    """Returns settings with this many replicas, if they have neither a number nor autoscaling."""
    if isinstance(data, dict) and data.get("autoscaling_config") is None and data.get("num_replicas") is None:
        return {**data, "num_replicas": replicas}
    return data


class DrafterSettings(ServeKeys):
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
