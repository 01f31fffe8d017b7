"""Configuration of the gateway: its application in a serve file, and the port that it opens.

Invariant: the port is on loopback, or on one address of the node and there with tokens alone.
"""

from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

GATEWAY = "tailrace.app.gateway.build:build"
LOOPBACK = ("127.0.0.1", "::1", "localhost")

CONVERSATION_TOKENS = 4_000_000
"""Tokens of earlier chats that a replica keeps, so that their next turns begin with the same token ids: 16 MB."""


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GatewayConfig(Strict):
    """`tokens_file`: lines of `ROLE TOKEN`, with the roles of `RolloutClient`. Without one, each caller is an evaluator
    (it rolls out, and changes nothing), and the port has to be on loopback.
    """

    host: str = Field("127.0.0.1", description="loopback, or an address of the head node where a token is needed")
    port: int = Field(8000, ge=1, le=65_535, description="where the gateway listens; its replicas share it")
    replicas: int = Field(1, ge=1, description="replicas of the gateway, which share nothing but the service")
    app_name: str = Field("tailrace", description="the service's application")
    tokens_file: str | None = Field(None, description="absolute path of `ROLE TOKEN` lines; null: no token is needed")
    max_open: int = Field(2_000, ge=1, description="requests at once on one replica; more get 429")
    tool_parser: str | None = Field(
        None, description="vLLM's parser of tool calls, by its name, such as hermes; null: no tools"
    )
    reasoning_parser: str | None = Field(
        None, description="vLLM's parser of thoughts, by its name, such as qwen3; null: they are part of the content"
    )
    return_sampling_mask: bool = Field(
        False, description="as vLLM's flag: answers of /inference/v1/generate have sampling_mask, so top_k is needed"
    )
    max_body_bytes: int = Field(10 << 20, ge=1, description="of one request; a larger one gets 413")

    @field_validator("host")
    @classmethod
    def _one_interface(cls, host: str) -> str:
        with suppress(ValueError):  # a name: it means one interface
            if ip_address(host).is_unspecified:
                host = ""
        if not host:
            raise ValueError("give loopback or an address of the node, not all interfaces")
        return host

    @field_validator("tokens_file")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        if path is not None and not Path(path).is_absolute():
            raise ValueError(f"{path} is not absolute; the gateway runs in a folder of Ray's")
        return path

    @model_validator(mode="after")
    def _guarded(self):
        if self.host not in LOOPBACK and self.tokens_file is None:
            raise ValueError(f"host: {self.host} is open to others; set tokens_file")
        return self


class GatewayApplication(Strict):
    """HTTP for the service of the same file."""

    name: str = Field("gateway", description="name of the gateway's application")
    import_path: Literal["tailrace.app.gateway.build:build"] = Field(
        GATEWAY, description="what Serve builds: always this"
    )
    runtime_env: dict[str, Any] = Field(default_factory=dict, description="Ray's runtime environment of its replicas")
    args: GatewayConfig = Field(GatewayConfig(), description="what the gateway answers, and to whom")
