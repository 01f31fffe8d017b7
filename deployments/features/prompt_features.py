"""The features of one prompt as the service sends them between processes, with names made from their content.

Invariant: two items with one name have the same bytes, whatever hash a caller sends. The name is vLLM's `mm_hash`: it
is part of the keys of KV blocks, of vLLM's caches of encoder outputs, and of the names of groups and prompts.
"""

import binascii
import json
from base64 import b64decode
from dataclasses import dataclass
from hashlib import blake2b

from tailrace.deployments.features.wire import Features


@dataclass(frozen=True, slots=True)
class FeatureItem:
    """One image, video or sound. `content`, `metadata`: vLLM's msgpack; `metadata` repeats some of the fields, or is
    empty. `offset`, `length`: its placeholder in the prompt, in tokens."""

    modality: str
    offset: int
    length: int
    name: str
    content: bytes
    metadata: bytes = b""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PromptFeatures:
    """`items`: ordered by offset. `name`: names the items and their positions, 64 hex digits."""

    items: tuple[FeatureItem, ...]
    name: str

    @classmethod
    def of(cls, features: Features) -> "PromptFeatures":
        """Converts a request's features. Raises ValueError, one line, for a text that is not base64."""
        items = []
        for modality, spans in features.mm_placeholders.items():
            metadata = (features.mm_metadata or {}).get(modality, (None,) * len(spans))
            data = zip(spans, features.kwargs_data[modality], metadata, strict=True)
            for number, (span, text, more) in enumerate(data):
                place = f"features: item {number} of {modality!r}"
                content, known = _decoded(text, place), _decoded(more or "", place)
                name = item_name(modality, content, known)
                items.append(FeatureItem(modality, span.offset, span.length, name, content=content, metadata=known))
        items.sort(key=lambda item: item.offset)
        places = [(item.name, item.offset, item.length) for item in items]
        return cls(
            tuple(items), blake2b(json.dumps(places).encode(), digest_size=32, person=b"tailrace-prompt").hexdigest()
        )

    @property
    def end(self) -> int:
        """The position after the last placeholder."""
        return self.items[-1].offset + self.items[-1].length


def item_name(modality: str, content: bytes, metadata: bytes) -> str:
    """Returns 64 hex digits of blake2b over the content: no two contents with one name can be found."""
    digest = blake2b(f"{modality}\0{len(content)}\0".encode(), digest_size=32, person=b"tailrace-item")
    digest.update(content)
    digest.update(metadata)
    return digest.hexdigest()


def continues(earlier: PromptFeatures | None, later: PromptFeatures | None, context_tokens: int) -> bool:
    """Returns whether a prompt with features `later` can continue a context of that length that has `earlier`: the same
    items at the same positions, and any others after the context.
    """
    before, now = (() if each is None else each.items for each in (earlier, later))
    same = [(item.name, item.offset, item.length) for item in now[: len(before)]]
    is_same = same == [(item.name, item.offset, item.length) for item in before]
    return is_same and all(item.offset >= context_tokens for item in now[len(before) :])


def _decoded(text: str, place: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{place}: it is not base64: {error}") from error
