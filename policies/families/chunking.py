"""How much of a sample runs at once (divided rollout, Seer 4.2). The core reserves KV for all of it."""

from typing import Annotated, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.protocol.views import SampleView


@runtime_checkable
class Chunking(Protocol):
    def tokens(self, sample: SampleView) -> int: ...


class FixedChunks(BaseModel):
    """min(chunk_tokens, what is left of the sample's max_tokens); null runs every sample in one piece.

    KV is kept and moved in whole blocks, so whoever continues with a sample computes what stands in an unfinished one
    again. With `block_tokens` a chunk that is not the last ends so early that only its last token, whose KV nobody has
    computed, stands behind a whole block; a chunk that would have no token then is as long as without.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["fixed"] = "fixed"
    chunk_tokens: int | None = Field(8192, ge=1, description="most new tokens of a chunk; null: no chunks")
    block_tokens: int = Field(1, ge=1, description="end chunks at KV blocks of so many tokens, as the engines' are")

    def tokens(self, sample: SampleView) -> int:
        left = sample.max_tokens - sample.generated_tokens
        if self.chunk_tokens is None or self.chunk_tokens >= left:
            return left
        computed = sample.prompt_tokens + sample.generated_tokens + self.chunk_tokens - 1
        over = computed % self.block_tokens
        return self.chunk_tokens - over if over < self.chunk_tokens else self.chunk_tokens


ChunkingPolicy = Annotated[FixedChunks, Field(discriminator="type")]
