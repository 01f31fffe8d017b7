"""The features of one prompt as the service sends them between processes, with names made from their content.

Invariant: two items with one name have the same bytes, whatever hash a caller sends. The name is vLLM's `mm_hash`: it
is part of the keys of KV blocks, of vLLM's caches of encoder outputs, and of the names of groups and prompts.
"""

import binascii
import json
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from tailrace.deployments.features.wire import Features


class DataMissing(ValueError):
    """An item has no data in the request, and none is known by its name: send it again with its data."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ItemData:
    """One image, video or sound, wherever it is. `name`: of its content, 64 hex digits. `content`, `metadata`: vLLM's
    msgpack; `metadata` repeats some of the fields, or is empty."""

    modality: str
    name: str
    content: bytes
    metadata: bytes = b""


class FeatureItem(NamedTuple):
    """An item of a prompt. `offset`, `length`: its placeholder, in tokens."""

    offset: int
    length: int
    data: ItemData

    @property
    def name(self) -> str:
        return self.data.name


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PromptFeatures:
    """`items`: ordered by offset. `name`: names the items and their positions, 64 hex digits."""

    items: tuple[FeatureItem, ...]
    name: str

    @classmethod
    def of(cls, features: Features, kept: Mapping[str, ItemData] = {}) -> "PromptFeatures":
        """Converts a request's features. `kept`: known items by their names. Raises ValueError, one line, for a text
        that is not base64, and DataMissing for an item without data that is not known.
        """
        items = []
        for modality, spans in features.mm_placeholders.items():
            metadata = (features.mm_metadata or {}).get(modality, (None,) * len(spans))
            data = zip(spans, features.kwargs_data[modality], metadata, features.mm_hashes[modality], strict=True)
            for number, (span, text, more, sent_hash) in enumerate(data):
                place = f"features: item {number} of {modality!r}"
                content, told = _decoded(text, place), _decoded(more or "", place)
                name = item_name(modality, content, told) if text else sent_hash
                item = kept.get(name) or ItemData(modality, name, content, told)
                if not item.content or item.modality != modality:
                    raise DataMissing(f"{place}: it has no data, and the service has none by its hash; send them")
                items.append(FeatureItem(span.offset, span.length, item))
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
