"""How much of a sample runs at once (divided rollout, Seer 4.2). The core reserves KV for all of it."""

from typing import Annotated, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from policies.views import SampleView


@runtime_checkable
class Chunking(Protocol):
    def tokens(self, sample: SampleView) -> int: ...


class Fixed(BaseModel):
    """min(chunk_tokens, what is left of the sample's max_tokens); null runs every sample in one piece."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["fixed"] = "fixed"
    chunk_tokens: int | None = Field(8192, ge=1, description="most new tokens of a chunk; null: no chunks")

    def tokens(self, sample: SampleView) -> int:
        left = sample.max_tokens - sample.generated_tokens
        return left if self.chunk_tokens is None else min(self.chunk_tokens, left)


ChunkingPolicy = Annotated[Fixed, Field(discriminator="type")]
