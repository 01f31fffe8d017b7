"""Chunk lengths: how much of a sample runs at once (divided rollout, Seer 4.2). The core reserves KV for all of it."""

from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.protocol.views import SampleView


@runtime_checkable
class Chunking(Protocol):
    def tokens(self, sample: SampleView) -> int: ...


class FixedChunks(BaseModel):
    """min(chunk_tokens, the rest of the sample's max_tokens); null runs every sample in one piece.

    KV is kept and moved in whole blocks, so the tokens of an unfinished block are computed again after a move. With
    `block_tokens`, a chunk that is not the last ends one token after a whole block: the KV of that last token is not
    computed yet. A chunk that would have no token then keeps its full length.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["fixed"] = "fixed"
    file_keys: ClassVar[tuple[str, ...]] = ("chunk_tokens",)
    chunk_tokens: int | None = Field(8192, ge=1, description="max new tokens of a chunk; null: no chunks")
    block_tokens: int = Field(1, ge=1, description="tokens of a KV block, at whose end chunks end")

    def tokens(self, sample: SampleView) -> int:
        left = sample.max_tokens - sample.generated_tokens
        if self.chunk_tokens is None or self.chunk_tokens >= left:
            return left
        computed = sample.prompt_tokens + sample.generated_tokens + self.chunk_tokens - 1
        over = computed % self.block_tokens
        return self.chunk_tokens - over if over < self.chunk_tokens else self.chunk_tokens


def at_blocks(chunking: BaseModel, block_tokens: int) -> BaseModel:
    """Returns the policy with chunks that end with the engines' KV blocks, unless it is another's or has a size."""
    if isinstance(chunking, FixedChunks) and chunking.block_tokens == 1:
        return chunking.model_copy(update={"block_tokens": block_tokens})
    return chunking


ChunkingPolicy = Annotated[FixedChunks, Field(discriminator="type")]
