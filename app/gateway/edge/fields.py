"""Bases of requests' bodies, and of the objects in them.

Invariant: null means "not given", for each field of such a model. Free dictionaries, such as schemas, keep their nulls.
An extra key of an object inside a body has no effect, as in vLLM 0.32.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Listed = Field(fail_fast=True)
"""Reports a list's first fault only: the faults of a body of 10 MB have gigabytes."""

Ids = Annotated[list[int], Listed]
Texts = Annotated[list[str], Listed]


class RequestObject(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class RequestBody(RequestObject):
    """A body, whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")
