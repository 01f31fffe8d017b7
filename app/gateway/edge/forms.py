"""Forms of answers in requests: OpenAI's `response_format`, and vLLM's `structured_outputs`.

Source: vLLM 0.32, `entrypoints/generate/base/protocol.py`, `sampling_params.py`.
"""

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from tailrace.app.gateway.edge.errors import FieldRefused
from tailrace.app.gateway.edge.fields import RequestObject, Texts


class ResponseFormat(RequestObject):
    """OpenAI's form of an answer, or vLLM's structural tags, which have their own fields."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _schema(self):
        if self.type == "json_schema" and self.json_schema is None:
            raise FieldRefused(
                "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
                "response_format",
            )
        return self

    def form(self) -> dict | None:
        """Returns the form for StructuredOutputs. Raises ValueError if there is no schema."""
        if self.type == "structural_tag":
            return {"structural_tag": {"type": self.type} | (self.model_extra or {})}
        if self.type == "json_schema":
            if not isinstance(schema := self.json_schema.get("schema"), dict):
                raise ValueError("response_format: json_schema.schema is not there; give one")
            return {"json": schema}
        return {"json_object": True} if self.type == "json_object" else None


FORM_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""Options of vLLM's `structured_outputs`; each could change a token."""


class RequestedForm(RequestObject):
    """vLLM's `structured_outputs`, without options."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_options(cls, given: Any) -> Any:
        asked = [name for name in FORM_OPTIONS if isinstance(given, dict) and given.get(name)]
        if asked:
            raise ValueError(f"{asked[0]}: not honoured here; remove it")
        return given

    def form(self) -> dict[str, Any]:
        """Returns the form for StructuredOutputs."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        found = {name: value for name, value in given.items() if value is not None}
        return {"json": found.pop("json_schema")} | found if "json_schema" in found else found
