"""Number of replicas of a deployment, as the configuration has it: `replicas: 2`, or `replicas: {min: 1, max: 2}`."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Replicas(BaseModel):
    """A fixed number, or two limits between which the `tail` policy decides."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    min: int = Field(ge=0, description="replicas that always stay")
    max: int = Field(ge=1, description="replicas while all have work")

    @model_validator(mode="after")
    def _ordered(self):
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, more than max, {self.max}")
        return self

    @property
    def come_and_go(self) -> bool:
        return self.min < self.max


def fixed(count: int) -> Replicas:
    """Returns a number that does not change."""
    return Replicas(min=count, max=count)


def _limits(value: Any) -> Any:
    """Returns both limits of a plain number."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"give 1 or more, not {value}")
        return {"min": value, "max": value}
    return value


ReplicaCount = Annotated[Replicas, BeforeValidator(_limits, json_schema_input_type=int | Replicas)]
