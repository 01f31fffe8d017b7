"""Figures of a modelled replica for long contexts: steps with attention's own operations, and tiers of KV.

`agent_replica` takes the speeds of `hardware` and adds what long prompts need. Every figure beyond `hardware`'s has its
source or the reason why it is assumed in `ASSUMPTIONS`, which `bench agents` prints. Called by `bench agents`.
"""

from dataclasses import dataclass

from tailrace.lab.simulator.agents.trace import AgentTurn
from tailrace.lab.simulator.hardware import (
    COMPUTE_SHARE,
    GPUS,
    MODELS,
    NETWORK_BYTES_S,
    SEND_SHARE,
    nearest,
    replica_model,
)
from tailrace.lab.simulator.types import StepModel

STEP_TOKENS = 8192
"""Tokens of a step: vLLM 0.32's default of max_num_batched_tokens on such GPUs, with chunked prefill."""

SSD_BYTES_S = 6e9
"""Bytes read from SSD a second, for each GPU: a DGX H100 has 8 drives of 3.84 TB for 8 GPUs; PCIe 4 drives read 6 to
7 GB/s."""

PCIE_BYTES_S = 64e9
"""Bytes a second between a GPU and its host: PCIe 5.0 x16, in one direction."""

ASSUMPTIONS = {
    "speeds": "lab/simulator/hardware.py: NVIDIA's datasheets at 0.8 of bandwidth and 0.5 of dense BF16 operations, "
    "3 ms a step",
    "attention": "4 * hidden * layers operations for a token and a token of its context, at the same 0.5 (causal "
    "attention: two products)",
    "steps": "8,192 tokens at most, prefill in chunks beside all decoding: vLLM 0.32's default, for every system",
    "dram": "128 GB a GPU: half of a DGX H100's 2 TB (datasheet) over 8 GPUs; assumed that the rest is taken",
    "ssd": "6 GB/s a GPU: one of 8 NVMe drives of a DGX H100 (datasheet); off by default",
    "own_dram": "64 GB/s * 0.8: PCIe 5.0 x16; vLLM's CPU offloading and SGLang's HiCache, for sticky and prefix",
    "pool": "50 GB/s * 0.8 and 20 ms: 400 Gbit/s RDMA as for all set-ups here (--pool-gbit); Mooncake, for "
    "round_robin_pool and tailrace",
    "saves": "KV is saved at a turn's end and in its background, as vLLM's connectors do; it delays nothing",
    "caches": "least recently used contexts lose their end first (vLLM's free queue), for every system",
    "gaps": "those recorded, people's included, cut to gap_cap_s",
    "load": "sessions begin at a random request, longer ones likelier; one that ends is replaced by another",
    "tokens": "recorded lengths; nothing depends on what they say",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentReplica:
    """A replica for long contexts. A step also takes `attention_s` for each computed token and token of its context.
    Moving n tokens of KV takes tier_base_s + n / tokens_s of its tier; `dram_tokens`, `ssd_tokens`: its share of each.
    """

    step: StepModel
    attention_s: float
    hbm_tokens: int
    dram_tokens: int
    ssd_tokens: int
    own_tokens_s: float
    pool_tokens_s: float
    ssd_tokens_s: float
    fetch_base_s: float
    step_tokens: int = STEP_TOKENS

    def work_s(self, turn: AgentTurn) -> float:
        """Returns the seconds that a turn takes of a replica whatever its schedule: its new tokens are computed over
        the context, and each token of the answer reads it.
        """
        new_tokens = turn.context - turn.known
        prefill_s = new_tokens * (self.step.token_s + self.attention_s * (turn.known + new_tokens / 2))
        return prefill_s + turn.out * (self.step.token_s + self.step.context_s * turn.context)


def agent_replica(
    gpu: str, model: str, gpus_per_replica: int, dram_bytes: float, ssd_bytes: float,
    pool_bytes_s: float = NETWORK_BYTES_S,
) -> AgentReplica:  # fmt: skip
    """Returns a replica of a dense model, with bytes of DRAM and SSD and of the pool's network for each GPU. Raises
    ValueError for an unknown name, a mixture of experts, or if the weights do not fit.
    """
    whole = replica_model(gpu, model, gpus_per_replica)
    figures, n = MODELS[model], gpus_per_replica
    if figures.experts:
        dense = {name: of for name, of in MODELS.items() if not of.experts}
        raise ValueError(f"{model} has experts, whose attention is not modelled here; {nearest(dense, model)}")
    operations = 4 * figures.hidden * figures.layers
    kv_bytes = figures.kv_bytes
    return AgentReplica(
        step=whole.step,
        attention_s=operations / (GPUS[gpu].bf16_ops_s * COMPUTE_SHARE * n),
        hbm_tokens=whole.kv_capacity_tokens,
        dram_tokens=int(dram_bytes * n / kv_bytes),
        ssd_tokens=int(ssd_bytes * n / kv_bytes),
        own_tokens_s=PCIE_BYTES_S * SEND_SHARE * n / kv_bytes,
        pool_tokens_s=pool_bytes_s * SEND_SHARE * n / kv_bytes,
        ssd_tokens_s=SSD_BYTES_S * n / kv_bytes,
        fetch_base_s=whole.fetch_base_s,
    )
