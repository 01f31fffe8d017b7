"""Bases of the messages between driver and coordinator: pydantic models that are immutable and refuse unknown keys."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from tailrace.deployments.messages.refusals import refusal


class Message(BaseModel):
    """Base of all messages: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestMessage(Message):
    """A message made by drivers. Raises ValueError with a substitute for fields of other servers, see `refusals`.

    A message inside another one is checked again, since `model_copy` checks nothing.
    """

    model_config = ConfigDict(revalidate_instances="always")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if (reason := refusal(data, cls.model_fields)) is not None:
            raise ValueError(reason)
        return data
