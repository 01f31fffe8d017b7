"""LoRA adapters: their names, and the content that a sample is made with."""

from typing import NamedTuple


class Adapter(NamedTuple):
    """One content under a name. `version`: counts the contents that the name has had, from 1. `digest`: 16 hex digits
    that name the content; tokens depend on it alone. `path`: a folder in PEFT's format, from which replicas load it.
    """

    name: str
    version: int
    digest: str
    path: str


def digest_of(adapter: Adapter | None) -> str:
    """Returns the digest; empty for the model without an adapter."""
    return "" if adapter is None else adapter.digest
