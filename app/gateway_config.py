"""Configuration of the gateway: `args` of its application in a serve file."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator


class GatewayConfig(BaseModel):
    """`tokens_file`: lines of `ROLE TOKEN`, the roles being those of `RolloutClient`. Without one, each caller is a
    trainer, and the port has to be on loopback."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    app_name: str = Field("tailrace", description="the service's application")
    tokens_file: str | None = Field(None, description="absolute path of `ROLE TOKEN` lines; null: no token is needed")
    max_open: int = Field(2_000, ge=1, description="requests at once on one replica; more get 429")
    max_body_bytes: int = Field(10 << 20, ge=1, description="of one request; a larger one gets 413")

    @field_validator("tokens_file")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        if path is not None and not Path(path).is_absolute():
            raise ValueError(f"{path} is not absolute; the gateway runs in a folder of Ray's")
        return path
