"""Processed images, videos and sounds of a prompt, in the format of vLLM 0.32.

Source of names and rules: `MultiModalFeatures`, `entrypoints/scale_out/token_in_token_out/protocol.py`. Here every item
carries its data, or an empty text if the service has them by its name: see `KeptItems`. Part of a PromptGroup, and of
the gateway's requests.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_ITEMS = 256
"""Maximum number of items of one prompt."""

MAX_BYTES = 256 << 20
"""Maximum size of all encoded items of one prompt: a large image has some 20 MB."""

Encoded = dict[str, tuple[str | None, ...]]
"""One text for each item, by modality: base64 of vLLM's msgpack."""


class PlaceholderSpan(BaseModel):
    """Token positions [offset, offset + length) of a prompt, whose embeddings come from one item."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    offset: int = Field(ge=0)
    length: int = Field(ge=1)


class Features(BaseModel):
    """`mm_hashes` is required only for compatibility, but for items without data: names are made from the content, see
    `PromptFeatures`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always")
    mm_hashes: dict[str, tuple[str, ...]]
    mm_placeholders: dict[str, tuple[PlaceholderSpan, ...]]
    kwargs_data: Encoded | None = None
    mm_metadata: Encoded | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = {modality: len(hashes) for modality, hashes in self.mm_hashes.items()}
        for name in ("mm_placeholders", "kwargs_data", "mm_metadata"):
            given = getattr(self, name)
            if given is not None and {modality: len(items) for modality, items in given.items()} != counts:
                raise ValueError(f"{name}: give as many items as mm_hashes has, of the same modalities")
        if (items := sum(counts.values())) > MAX_ITEMS:
            raise ValueError(f"{items} items; a prompt has at most {MAX_ITEMS}")
        if items and None in self._texts(self.kwargs_data or {"": (None,)}):
            raise ValueError("kwargs_data: give the data of every item; none is kept here for later requests")
        size = sum(len(text or "") for data in (self.kwargs_data, self.mm_metadata) for text in self._texts(data or {}))
        if size > MAX_BYTES:
            raise ValueError(f"{size} bytes; a prompt has at most {MAX_BYTES}")
        spans = sorted((span.offset, span.length) for of in self.mm_placeholders.values() for span in of)
        if any(offset + length > after for (offset, length), (after, _) in pairwise(spans)):
            raise ValueError("mm_placeholders: two of them overlap")
        return self

    @staticmethod
    def _texts(data: Encoded) -> list[str | None]:
        return [text for items in data.values() for text in items]

    def without(self, names: Collection[str]) -> Self:
        """Returns the features without the data of items whose `mm_hash` is one of `names`."""
        data = {
            modality: tuple(
                "" if of in names else text for of, text in zip(self.mm_hashes[modality], texts, strict=True)
            )
            for modality, texts in self.kwargs_data.items()
        }
        return self.model_copy(update={"kwargs_data": data})

    @property
    def is_empty(self) -> bool:
        return not any(self.mm_hashes.values())

    @property
    def end(self) -> int:
        """The position after the last placeholder; 0 without one."""
        return max((span.offset + span.length for of in self.mm_placeholders.values() for span in of), default=0)
