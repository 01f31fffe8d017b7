"""Settings of one engine replica. The defaults are for CPUs; `serve.gpu.yaml` sets the values for GPUs."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tailrace.deployments.declared_fields import declared_fields, fitted
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.keyed_error import KeyedError
from tailrace.deployments.vllm_exact.attention import check_invariant
from tailrace.policies.protocol.exactness import Exactness
from tailrace.policies.protocol.file_keys import without_constants

ENGINE_ARGS = ("vllm", "engine/arg_utils.py", "EngineArgs")
"""Where vLLM's own class of settings is defined: package, file, name."""

OURS = {
    "model": "model", "dtype": "dtype", "max_model_len": "max_model_len", "max_num_seqs": "max_running",
    "max_num_active_seqs": "max_running", "max_num_batched_tokens": "max_batched_tokens", "block_size": "block_tokens",
    "tensor_parallel_size": "tensor_parallel", "worker_cls": "", "seed": "",
    "enable_prefix_caching": "", "enable_chunked_prefill": "", "max_logprobs": "",
    "disable_log_stats": "", "mm_processor_cache_gb": "",
}  # fmt: skip
"""Arguments that the engine always sets itself, each with the key here that sets its value; empty if none does."""


ROUTED_EXPERTS = "enable_return_routed_experts"
"""vLLM's argument for routed experts in results. vLLM's own way needs its second runner and has none of pulled KV."""

SPECULATION = "speculative_config"
"""vLLM's argument for its own drafter, which drafts beside the index, or alone with `draft.method: vllm`."""

ASYNC = "async_scheduling"
"""vLLM's argument for steps that are scheduled before the tokens of the one before have arrived."""

STAGES = "pipeline_parallel_size"
"""vLLM's argument for stages of layers: records are those of the first rank, and only the last stage draws."""


def known_arguments(value: dict[str, Any]) -> dict[str, Any]:
    """Checks arguments for vLLM's EngineArgs, and returns them as values of their types. All names pass if vLLM is not
    installed.

    Raises KeyedError for a name that vLLM does not have, and for one that the engine sets.
    """
    for key in value:
        if key in OURS:
            mend = f"set {OURS[key]} instead" if OURS[key] else "remove it"
            raise KeyedError(str(key), f"the engine sets it itself; {mend}")
    return fitted(value, declared_fields(ENGINE_ARGS), "vLLM's EngineArgs") if value else value


BLOCK_TOKENS = {"cpu": 32, "gpu": 16}
"""Tokens per KV block, by device: with 32, a pull from the pool on a CPU has half as many pieces; 16 is vLLM's own."""


def usual_level(given: dict[str, Any]) -> Exactness:
    """Returns the level for these settings: bits for float32 on a CPU, which costs nothing there, else law.

    Batch-invariant kernels took 31 to 58 % of a GPU's tokens a second in others' measurements (docs/exactness.md).
    """
    return "bits" if given.get("device") == "cpu" and given.get("dtype") == "float32" else "law"


def usual_runner(given: dict[str, Any]) -> str:
    """Returns vLLM's model runner for these settings: V2, its default, on GPUs, unless V2 lacks their drafter."""
    drafter = (given.get("vllm_args") or {}).get(SPECULATION)
    suffix = isinstance(drafter, dict) and drafter.get("method") == "suffix"
    return "v1" if given.get("device") != "gpu" or suffix else "v2"


INDEX_MIB = 32
"""MiB for indexes of each chunk that may run: 512 for 16 of them on a CPU, 8192 for 256 on a GPU."""


class DraftConfig(BaseModel):
    """The source of draft tokens.

    `group` is the index of the sample's group, with a draft model if there is one. `model` is the draft model alone.
    `vllm` is vLLM's own drafter alone (`vllm_args.speculative_config`); with that argument it drafts beside the others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=without_constants)
    file_keys: ClassVar[tuple[str, ...]] = ("method",)

    method: Literal["off", "group", "model", "vllm"] = Field(
        "group",
        description="group: the index of the sample's group, and a draft model if there is one; model: the draft model "
        "alone; vllm: vLLM's own drafter alone, that of vllm_args.speculative_config",
    )
    draft_tokens: int = Field(16, ge=1, le=64, description="maximum draft tokens per verification")
    index: IndexSettings = Field(IndexSettings(), description="group: parts and weights of the index")
    index_mib: int = Field(512, ge=1, description="group: memory for indexes, beyond those of running chunks")

    @field_validator("method", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """Undoes YAML 1.1, which Serve reads: it takes `off` for false. Says what replaces methods of old files."""
        if value in ("ngram", "suffix"):
            raise ValueError(f"write vllm, and its drafter in vllm_args.{SPECULATION}, with method: {value}")
        return "off" if value is False else value

    @property
    def drafts(self) -> bool:
        """True if the engine drafts, see deployments.drafting.drafts."""
        return self.method != "off"


class EngineConfig(BaseModel):
    """Settings of one vLLM engine: its model, its memory, its device."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=without_constants)
    file_keys: ClassVar[tuple[str, ...]] = (
        "model",
        "device",
        "dtype",
        "exactness",
        "max_model_len",
        "max_running",
        "max_batched_tokens",
        "kv_cache_gib",
        "cores",
        "tensor_parallel",
        "redraw_close_calls",
        "draft",
        "model_runner",
        "vllm_args",
    )

    model: str = Field(description="a local Hugging Face folder, at the same path on every node; or demo")
    device: Literal["cpu", "gpu"] = Field("cpu", description="what the engine runs on")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="type of weights and KV; on a CPU float16 cannot have bits: docs/exactness.md"
    )
    exactness: Exactness = Field(
        default_factory=usual_level,
        description="law: the fastest kernels; bits: a second run has the same tokens; docs/exactness.md",
    )
    max_model_len: int = Field(4096, ge=16, description="longest prompt plus answer, in tokens")
    max_running: int = Field(16, ge=1, description="maximum chunks in one engine step (vLLM max_num_seqs)")
    max_batched_tokens: int = Field(2048, ge=16, description="maximum tokens computed in one engine step")
    kv_cache_gib: float | None = Field(2.0, gt=0, description="KV cache size; null: vLLM decides")
    block_tokens: int = Field(
        default_factory=lambda given: BLOCK_TOKENS[given.get("device", "cpu")], ge=1, description="tokens per KV block"
    )
    cores: int | None = Field(
        1, ge=1, description="CPU cores of a replica on a CPU, which it binds to; null: one core, without binding"
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs of a replica, or its ranks on a CPU")
    # Logprobs of the demo model moved by at most 2.2e-5 between batch shapes, so distances by 4.3e-5: four times that.
    close_call_tolerance: float = Field(
        2e-4, gt=0, le=0.1, description="a draw whose two best candidates are closer, in logits, is a close call"
    )
    redraw_close_calls: bool = Field(
        False, description="draw close calls again from a canonical computation; docs/exactness.md has the cost"
    )
    draft: DraftConfig = DraftConfig()
    vllm_args: dict[str, Any] = Field(
        {},
        description="passed on to vLLM's EngineArgs as they are; for adapters `{enable_lora: true, max_lora_rank: N}`",
    )
    model_runner: Literal["v1", "v2"] = Field(
        default_factory=usual_runner,
        description="vLLM's model runner (VLLM_USE_V2_MODEL_RUNNER); v2 on GPUs alone, docs/exactness.md",
    )

    _known = field_validator("vllm_args")(known_arguments)

    @model_validator(mode="after")
    def _no_argument_of_ours(self) -> "EngineConfig":
        ours = {"enforce_eager": self.device == "cpu", "kv_cache_memory_bytes": self.kv_cache_gib is not None}
        for key in self.vllm_args:
            if ours.get(key):
                mend = "set kv_cache_gib instead" if key == "kv_cache_memory_bytes" else "remove it"
                raise KeyedError(f"vllm_args.{key}", f"the engine sets it itself; {mend}")
        if self.vllm_args.get(STAGES, 1) != 1:
            raise KeyedError(f"vllm_args.{STAGES}", "an engine has one stage; remove it, and set tensor_parallel")
        return self

    @model_validator(mode="after")
    def _drafter_fits(self) -> "EngineConfig":
        key, own = f"vllm_args.{SPECULATION}", self.vllm_args.get(SPECULATION)
        if self.draft.method == "vllm" and own is None:
            raise KeyedError("draft.method", f"vllm needs {key}, such as {{method: mtp, num_speculative_tokens: 1}}")
        if own is None:
            return self
        if not self.draft.drafts:
            raise KeyedError(key, "draft.method is off; write vllm or group there, or remove it")
        length = own.get("num_speculative_tokens") if isinstance(own, dict) else None
        if not (isinstance(length, int) and 1 <= length <= self.draft.draft_tokens):
            raise KeyedError(
                key, f"it needs num_speculative_tokens, from 1 to {self.draft.draft_tokens}: tokens that it proposes"
            )
        if self.vllm_args.get("data_parallel_size", 1) > 1:
            raise KeyedError(key, "ranks of one engine would switch it apart; remove vllm_args.data_parallel_size")
        return self

    @model_validator(mode="after")
    def _level_fits(self) -> "EngineConfig":
        if self.exactness == "law" and self.redraw_close_calls:
            raise KeyedError(
                "redraw_close_calls",
                "at exactness law it would draw from two computations, so from the law of neither; remove it, or "
                "write exactness: bits",
            )
        if self.exactness == "bits" and self.device == "gpu":
            check_invariant(self.vllm_args)
        if self.exactness == "bits" and self.device == "cpu" and self.dtype == "float16":
            raise KeyedError(
                "exactness", "in float16 a CPU's tokens depend on the batch; write law, or dtype: bfloat16 or float32"
            )
        if self.has_windows and self.vllm_args.get("enable_lora"):
            raise KeyedError(
                "vllm_args.enable_lora", "bits in bfloat16 on a CPU takes no adapters; write law, or dtype: float32"
            )
        return self

    @model_validator(mode="after")
    def _runner_fits(self) -> "EngineConfig":
        if self.model_runner == "v2" and self.device == "cpu":
            raise ValueError("model_runner v2 runs on GPUs alone; with device cpu take v1")
        if self.model_runner == "v2" and (self.vllm_drafter or {}).get("method") == "suffix":
            raise ValueError("model_runner v2 has no suffix drafter; take another, or v1")
        return self

    @model_validator(mode="after")
    def _ahead_fits(self) -> "EngineConfig":
        if self.vllm_args.get(ASYNC) and not self._can_run_ahead:
            raise KeyedError(
                f"vllm_args.{ASYNC}",
                "it needs device: gpu, model_runner: v2, no redraw_close_calls; change these, or remove it",
            )
        return self

    @property
    def _can_run_ahead(self) -> bool:
        return self.model_runner == "v2" and not self.redraw_close_calls

    @property
    def runs_ahead(self) -> bool:
        """True if steps may be scheduled ahead, see vllm_exact.async_scheduling."""
        return self._can_run_ahead and self.vllm_args.get(ASYNC) is not False

    @property
    def has_windows(self) -> bool:
        """True for bits in bfloat16 on a CPU: passes are canonical, see vllm_exact.windows."""
        return (self.device, self.dtype, self.exactness) == ("cpu", "bfloat16", "bits")

    @property
    def keeps_routes(self) -> bool:
        """True if results have the routed experts of each token, see vllm_exact.expert_routes."""
        return bool(self.vllm_args.get(ROUTED_EXPERTS))

    @property
    def vllm_drafter(self) -> dict | None:
        """Returns the settings of vLLM's own drafter, or None if there is none."""
        return self.vllm_args.get(SPECULATION)

    @property
    def proposed_tokens(self) -> int:
        """Number of tokens that vLLM's own drafter proposes; 0 if there is none."""
        return (self.vllm_drafter or {}).get("num_speculative_tokens", 0)

    @property
    def draft_tokens(self) -> int:
        """Maximum draft tokens of a verification, 0 without drafts: with vLLM's drafter a multiple of its proposals,
        as vLLM wants it.
        """
        most = self.draft.draft_tokens if self.draft.drafts else 0
        return most - most % max(1, self.proposed_tokens)

    @property
    def sized_draft(self) -> DraftConfig:
        """Returns `draft` with memory for the indexes of as many chunks as may run, and with `draft_tokens`."""
        memory = max(self.draft.index_mib, INDEX_MIB * self.max_running)
        return self.draft.model_copy(update={"index_mib": memory, "draft_tokens": self.draft_tokens})

    @property
    def weight_transfer(self) -> str:
        """Name of the workers' transfer engine, see vLLM's `WeightTransferConfig`; empty if there is none."""
        found = self.vllm_args.get("weight_transfer_config") or {}
        return found.get("backend", "") if isinstance(found, dict) else getattr(found, "backend", "")
