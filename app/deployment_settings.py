"""The deployments' settings in `serve.yaml`, as strict models: Ray's resources, and ours in `user_config`.

Everything else that Serve needs for a deployment follows from `args` (`deployment_options`). Invariant: an unknown key
is an error; resources are passed to Ray unchanged. Used by `app.config` alone.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tailrace.deployments.batches.quotas import Quotas
from tailrace.deployments.declared_fields import declared_fields, fitted
from tailrace.policies.families.allowed_code import added_code, allow_code
from tailrace.policies.families.registry import Policies

ACTOR_OPTIONS = ("ray", "serve/schema.py", "RayActorOptionsSchema")
"""Where Serve's own class of resources is defined: package, file, name."""


class StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class UserConfig(StrictModel):
    """Settings that may change without a restart."""

    allowed_code: tuple[str, ...] = Field(
        (),
        validate_default=True,
        description="packages whose policies may be named by dotted path; taking one out needs a restart",
    )
    policies: Policies = Field(Policies(), description="a member of each family, by name or as a mapping with `type`")
    quotas: Quotas = Field(Quotas(), description="limits on the batches in flight")

    @field_validator("allowed_code")
    @classmethod
    def _allow(cls, packages: tuple[str, ...]) -> tuple[str, ...]:
        """Allows the file's packages before its policies are read, with those of the command line."""
        allow_code(*packages)
        return added_code()


class DeploymentSettings(StrictModel):
    """What a file may say of each deployment."""

    name: Literal["Engine", "Drafter"] = Field(description="Coordinator, Engine or Drafter")
    ray_actor_options: dict[str, Any] | None = Field(
        None,
        description="Ray's resources of a replica, such as num_cpus, in place of those that follow from args: none for "
        "the Coordinator, `cores` or 4 CPUs and `tensor_parallel` GPUs for the others",
    )

    @field_validator("ray_actor_options")
    @classmethod
    def _known(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        """Checks names and types by Serve's own class, if Ray is installed."""
        return options and fitted(options, declared_fields(ACTOR_OPTIONS), "Serve's ray_actor_options")


class CoordinatorSettings(DeploymentSettings):
    name: Literal["Coordinator"] = Field(description="Coordinator, Engine or Drafter")
    user_config: UserConfig = Field(default_factory=UserConfig, description="may change without a restart")


SETTINGS: dict[str, type[DeploymentSettings]] = {
    "Coordinator": CoordinatorSettings,
    "Engine": DeploymentSettings,
    "Drafter": DeploymentSettings,
}
