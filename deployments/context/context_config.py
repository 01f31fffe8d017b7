"""Settings of the group-context service. Read by its actors, by the engines' feeds and by the coordinator."""

from pathlib import PurePosixPath
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tailrace.deployments.context.prompt_files import FILES
from tailrace.policies.protocol.file_keys import without_constants

REPLICAS_PER_SHARD = 64
"""Engines for each shard; one takes 118 (docs/measurements/scale.md)."""


def plain_folder(path: str | None) -> str | None:
    """Returns the path of a folder that nodes may share. Raises ValueError if it is relative or contains `..`."""
    if path is not None and (not path.startswith("/") or ".." in PurePosixPath(path).parts):
        raise ValueError(f"{path!r}: give an absolute path without `..`")
    return path


class ContextConfig(BaseModel):
    """Where tokens of groups in flight and answers of earlier epochs are kept; limits and deadlines."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=without_constants)
    file_keys: ClassVar[tuple[str, ...]] = ("history_dir", "history_mib")

    shards: int = Field(1, ge=1, le=FILES, description="actors that share the prompts among them: one for 64 replicas")
    history_dir: str | None = Field(
        None, description="absolute folder, the same on every node; null: history lasts as long as its actors"
    )
    history_epochs: int = Field(16, ge=1, description="newest epochs kept of each prompt")
    history_mib: float = Field(4096, gt=0, description="maximum size of answers kept, packed; oldest epochs go first")
    live_mib: float = Field(512, gt=0, description="maximum memory of a shard for groups in flight")
    ttl_s: float = Field(900, gt=0, description="a group in flight is forgotten after this time without access")
    flush_s: float = Field(0.05, gt=0, description="minimum time between two exchanges of an engine with a shard")
    flush_tokens: int = Field(64, ge=1, description="fewer new tokens than this wait, at most linger_s")
    linger_s: float = Field(0.25, gt=0, description="longest wait of new tokens for more")
    unsent_tokens: int = Field(1_000_000, ge=1, description="maximum tokens an engine keeps for an actor that is away")
    deadline_s: float = Field(2.0, gt=0, description="an actor that takes longer has not answered an engine")
    lengths_deadline_s: float = Field(0.5, gt=0, description="a batch starts without past lengths that take longer")
    retry_s: float = Field(1.0, gt=0, description="pause of an engine's traffic with an actor after a failure")

    _plain = field_validator("history_dir")(plain_folder)

    def for_replicas(self, replicas: int) -> "ContextConfig":
        """Returns these settings with a shard for each REPLICAS_PER_SHARD of at most `replicas` engines."""
        wanted = min(-(-replicas // REPLICAS_PER_SHARD), FILES)
        return self.model_copy(update={"shards": max(self.shards, wanted)})
