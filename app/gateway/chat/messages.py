"""Messages of a chat, as clients send them back: the formats that vLLM 0.32 accepts, and their format for a template.

Invariant: a conversation that was answered here is accepted again, whatever its answers contain. Arguments of a call
that are no JSON object are an empty one for the template. Source: `renderers/chat_utils.py`, `renderers/hf.py`.
"""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, model_validator

from tailrace.app.gateway.edge.fields import Listed, RequestObject
from tailrace.app.gateway.edge.json_body import fault_of
from tailrace.app.gateway.images.sent_image import SentImage

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Types of parts that are text, with the field that holds it."""

IMAGES = ("image_url", "input_image")
"""Types of parts that are images, in OpenAI's chats and Responses."""

SYSTEM = ("system", "developer")

Lines = list[dict[str, Any]]
"""Messages in the format of templates."""


def _part(given: Any) -> Any:
    return {"type": "text", "text": given} if isinstance(given, str) else given


class ContentPart(RequestObject):
    """A piece of a message's content. `image_url`: a URL, or an object that has one; other fields of an image have no
    effect, as in vLLM.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: Any = None

    @cached_property
    def content(self) -> str | SentImage | None:
        """Its text or image, or None without the field of its text. Raises ValueError, one line, if it is neither."""
        if self.type in IMAGES:
            given = self.image_url
            return SentImage.of(given.get("url") if isinstance(given, dict) else given)
        if self.type not in TEXTS:
            raise ValueError(f"messages: content of type {self.type[:30]!r}: a chat is text and images here; remove it")
        return getattr(self, TEXTS[self.type])


class CalledFunction(RequestObject):
    """`arguments`: JSON as its caller sends it: a text, possibly cut off, or the value itself."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: Any = None

    def parsed(self) -> dict[str, Any] | None:
        """Returns the arguments as an object, or None if they are none, or one that no template can write."""
        found = self.arguments
        if isinstance(found, str):
            try:
                found = json.loads(found or "{}")
            except (ValueError, RecursionError):
                return None
        return found if isinstance(found, dict) and fault_of(found) is None else None


class RequestedCall(RequestObject):
    """A call of a tool that an earlier answer made."""

    model_config = ConfigDict(extra="allow")
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict:
        """Returns the call in the format of templates, in vLLM's order of keys."""
        called = {"arguments": self.function.parsed() or {}, "name": self.function.name}
        found = {"id": self.id, "function": called | (self.function.model_extra or {}), "type": self.type}
        return {name: value for name, value in found.items() if value is not None} | (self.model_extra or {})

    def normal(self) -> dict[str, Any]:
        """Returns the same value for calls with the same meaning: arguments by their values, unless they are no
        object.
        """
        arguments = self.function.parsed()
        if arguments is None:
            arguments = self.function.arguments
        return {"id": self.id, "name": self.function.name, "arguments": arguments or {}}


class RequestedMessage(RequestObject):
    """One message. Its other fields have no effect, as in vLLM."""

    role: str
    content: str | Annotated[list[Annotated[ContentPart, BeforeValidator(_part)]], Listed] | None = None
    name: str | None = None
    tool_calls: Annotated[list[RequestedCall], Listed] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tools: list[dict[str, Any]] | None = None
    task: str | None = None

    @model_validator(mode="after")
    def _one_name(self):
        self.reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        return self

    @property
    def has_images(self) -> bool:
        return isinstance(self.content, list) and any(part.type in IMAGES for part in self.content)

    def images(self) -> list[SentImage]:
        """Returns its images, in order. Raises ValueError, one line, for one that is not sent as a file."""
        return [one for one in self._contents() if isinstance(one, SentImage)]

    def text(self) -> str:
        """Returns the text, without images. Raises ValueError if it has content of another type."""
        return "\n".join(one for one in self._contents() if isinstance(one, str))

    def normal(self) -> dict[str, Any]:
        """Returns the same value for messages with the same meaning."""
        found = self._said(lambda image: {"image": image.digest})
        if self.role == "assistant":
            found["tool_calls"] = [call.normal() for call in self.tool_calls or ()]
            found["reasoning"] = self.reasoning
        return {name: value for name, value in found.items() if value not in (None, [])}

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the format of templates: with images, its content is a list of parts."""
        if self.has_images and self.role in SYSTEM:
            raise ValueError(f"messages: an image in a message of role {self.role!r}; send it in one of the user")
        said = self._said(lambda _: {"type": "image"})
        found = {name: value for name, value in said.items() if value is not None}
        if self.role == "assistant":
            calls = [call.for_template() for call in self.tool_calls or ()]
            found |= {"tool_calls": calls} if calls else {}
            if self.reasoning is not None:  # templates have it by either name
                found |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        return found

    def _contents(self) -> list[str | SentImage]:
        if isinstance(self.content, str) or self.content is None:
            return [self.content or ""]
        return [one for part in self.content if (one := part.content) is not None]

    def _said(self, shown: Callable[[SentImage], dict]) -> dict[str, Any]:
        content: str | Lines = self.text()
        if self.has_images:
            parts = self._contents()
            content = [shown(one) if isinstance(one, SentImage) else {"type": "text", "text": one} for one in parts]
        found = {"role": self.role, "content": content, "name": self.name, "task": self.task}
        if self.role == "tool":
            found["tool_call_id"] = self.tool_call_id
        if self.role == "developer":
            found["tools"] = self.tools
        return found


def fitting(lines: Lines, chat_template: object) -> Lines:
    """Returns the messages for a template: if it does not know the role `developer`, one system message replaces these,
    at the head, as vLLM makes it.
    """
    text = str(chat_template)
    if all(one["role"] != "developer" for one in lines) or "'developer'" in text or '"developer"' in text:
        return lines
    named = [_as_system(one) if one["role"] == "developer" else one for one in lines]
    places = [place for place, one in enumerate(named) if one["role"] == "system"]
    if places == [0]:
        return named
    head = {"role": "system", "content": _joined(named[place]["content"] for place in places)}
    return [head, *(one for one in named if one["role"] != "system")]


def _as_system(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "tools"} | {"role": "system"}


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text)
