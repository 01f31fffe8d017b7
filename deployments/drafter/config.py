"""Knobs of the draft models: `args.drafter` in the service's configuration."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.policies.protocol.actions import DraftMode


class DrafterConfig(BaseModel):
    """One draft model, on as many replicas as its deployment has; memory and speed are those of one replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="a local Hugging Face folder whose tokens mean what the target's mean")
    window: int = Field(4, ge=1, le=64, description="tokens drafted ahead; twice as many while those are verified")
    mode: Literal["decoupled", "coupled"] = Field("decoupled", description="coupled: drafter and sample take turns")
    patience_s: float = Field(0.5, ge=0, description="coupled: longest wait for a draft; then on alone")
    shared_noise: bool = Field(True, description="draw drafts with the sample's own noise; false: to measure without")
    max_running: int = Field(64, ge=1, description="most samples drafted for in one step")
    max_batched_tokens: int = Field(512, ge=16, description="most tokens of a step, contexts included")
    kv_cache_gib: float | None = Field(0.5, gt=0, description="KV cache size; null: vLLM decides")
    cores: int | None = Field(1, ge=1, description="CPU cores a replica binds to, from the last one down")
    tensor_parallel: int = Field(1, ge=1)
    vllm_args: dict[str, Any] = Field({}, description="passed on to vLLM's EngineArgs as they are")

    @property
    def way(self) -> DraftMode:
        """How samples are drafted whose plan does not say."""
        return DraftMode(self.window, self.mode == "coupled")

    def engine(self, target: EngineConfig) -> EngineConfig:
        """The draft model's engine: like the target's, but for what stands here."""
        ours = ("model", "max_running", "max_batched_tokens", "kv_cache_gib", "cores", "tensor_parallel", "vllm_args")
        return target.model_copy(update={name: getattr(self, name) for name in ours} | {"draft": NO_DRAFTS})


NO_DRAFTS = DraftConfig(method="off")
