"""Configuration of the draft models: `args.drafter` in the service's file."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tailrace.deployments.replica_count import ReplicaCount, fixed
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig, known_arguments
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.file_keys import without_constants


class DrafterConfig(BaseModel):
    """One draft model, on all replicas of its deployment; memory and speed are per replica."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=without_constants)
    file_keys: ClassVar[tuple[str, ...]] = ("model", "replicas")

    model: str = Field(description="a local Hugging Face folder; its token ids must mean the same as the target's")
    replicas: ReplicaCount = Field(
        fixed(1), description="running draft models; {min: 0, max: N} where the `tail` policy decides their number"
    )
    window: int = Field(4, ge=1, le=64, description="tokens drafted ahead; twice as many while those are verified")
    mode: Literal["decoupled", "coupled"] = Field(
        "decoupled",
        description="coupled: drafter and sample alternate; 7.8 tokens/s against 18.3 (docs/measurements/drafters.md)",
    )
    patience_s: float = Field(0.5, ge=0, description="coupled: longest wait for a draft; then a step without")
    shared_noise: bool = Field(True, description="draw drafts with the sample's own noise; false: to measure without")
    max_running: int | None = Field(
        None, ge=1, description="maximum samples drafted for in one step; null: 64 on a CPU, as the engines' on GPUs"
    )
    max_batched_tokens: int | None = Field(
        None, ge=16, description="maximum tokens of a step, with contexts; null: 512 on a CPU, as the engines' on GPUs"
    )
    kv_cache_gib: float | None = Field(
        None, gt=0, description="KV cache size; null: 0.5 on a CPU, as the engines' on GPUs"
    )
    cores: int | None = Field(1, ge=1, description="CPU cores a replica binds to, counted from the last core down")
    tensor_parallel: int = Field(1, ge=1, description="GPUs of a replica, or its ranks on a CPU")
    vllm_args: dict[str, Any] = Field({}, description="passed on to vLLM's EngineArgs as they are")

    _known = field_validator("vllm_args")(known_arguments)

    @property
    def draft_mode(self) -> DraftMode:
        """Mode of samples without one in their plan."""
        return DraftMode(self.window, self.mode == "coupled")

    def engine(self, target: EngineConfig) -> EngineConfig:
        """Returns the draft model's engine configuration: the target's, with the fields of this one replaced."""
        ours = ("model", "cores", "tensor_parallel", "vllm_args")
        changes = {name: getattr(self, name) for name in ours} | {"draft": NO_DRAFTS}
        for name, usual in CPU_SIZES.items():
            changes[name] = getattr(self, name) or (usual if target.device == "cpu" else getattr(target, name))
        return target.model_copy(update=changes)


CPU_SIZES = {"max_running": 64, "max_batched_tokens": 512, "kv_cache_gib": 0.5}
"""Sizes of a draft model on a CPU: it drafts for the samples of several engines, in short steps."""

NO_DRAFTS = DraftConfig(method="off")
