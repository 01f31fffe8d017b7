"""Settings of the KV pool, and the endpoint of one engine. Read by the pool's processes and by the connector."""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tailrace.policies.protocol.file_keys import without_constants

BUFFER_MIB = {"cpu": 64, "gpu": 512}
"""Size of the transfer buffer of an engine's client, by the engine's device: a GPU's chunks have more KV at once."""


class PoolConfig(BaseModel):
    """One pool: memory and disk on every node with an engine, and how long an engine waits for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=without_constants)
    file_keys: ClassVar[tuple[str, ...]] = (
        "protocol",
        "rdma_devices",
        "dram_gib",
        "ssd_path",
        "ssd_gib",
        "block_check",
    )

    protocol: Literal["tcp", "rdma"] = Field("tcp", description="way of KV between nodes; rdma needs a device for it")
    rdma_devices: str = Field("", description="names with commas between; empty: Mooncake finds them")
    dram_gib: float = Field(1.0, gt=0, description="memory per node")
    ssd_path: str | None = Field(None, description="absolute folder on every node; null: no SSD tier")
    ssd_gib: float = Field(16.0, gt=0, description="maximum use of the SSD of a node")
    buffer_mib: int | None = Field(
        None, ge=1, description="transfer buffer of an engine's client; null: 64 MiB on a CPU, 512 MiB on GPUs"
    )
    lookup_deadline_s: float = Field(0.5, gt=0, description="a look-up that takes longer finds nothing")
    load_deadline_s: float = Field(2.0, gt=0, description="KV that takes longer to load is computed again")
    save_deadline_s: float = Field(1.0, gt=0, description="KV that takes longer to save is not kept")
    block_check: Literal["checksum", "mac", "off"] = Field(
        "checksum", description="on each block of KV; one that fails is a miss. mac: against writes by other hosts, too"
    )
    mac_key_file: str = Field("~/.ray/auth_token", description="secret for `mac`; the same on every node")
    retry_s: float = Field(1.0, gt=0, description="pause of an engine's pool traffic after a failure")

    @field_validator("block_check", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """Undoes YAML 1.1, which Serve reads: it takes `off` for false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _a_plain_folder(self) -> "PoolConfig":
        path = self.ssd_path
        if path is not None and (not path.startswith("/") or ".." in PurePosixPath(path).parts):
            raise ValueError(f"ssd_path {path!r}: give an absolute path without `..`")
        return self


@dataclass(frozen=True)
class PoolEndpoint:
    """The pool of one engine: the address of its master, and the memory that is near."""

    master_address: str
    """host:port of the master's RPC."""
    host: str
    """The node's address, for the engine's own client."""
    segment: str
    """Name of the node's own memory, preferred when KV is put; empty: no preference."""
    config: PoolConfig
