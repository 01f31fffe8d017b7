"""Speeds of a replica of a model on some GPUs, from published figures; or from `tailrace profile` on this machine.

GPUS and MODELS hold datasheet and model card figures. Figures without a datasheet are under "assumed", each with its
reason, and none is fitted to any result. A step is the sum of what it reads, computes and sends: no overlap, so no
step comes out faster than hardware allows at these efficiencies. Called by scenarios.
"""

from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from tailrace.lab.simulator.types import ReplicaModel, StepModel


@dataclass(frozen=True, slots=True)
class Gpu:
    """Figures of one GPU; operations dense; `link_bytes_s` of NVLink in one direction."""

    memory_bytes: float
    memory_bytes_s: float
    bf16_ops_s: float
    fp8_ops_s: float
    link_bytes_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Model:
    """`kv_values`: numbers that one layer keeps of one token (2 * KV heads * head size; MLA: latent + rope).
    `kv_heads`: number of parts that GPUs can divide them into; 1 for MLA.

    Of a mixture of experts: routed experts per layer, those a token chooses, and layers that have them; the rest of the
    parameters is read for every token.
    """

    parameters: float
    active_parameters: float
    layers: int
    hidden: int
    kv_values: int
    source: str
    kv_heads: int = 8
    parameter_bytes: int = 2
    experts: int = 0
    chosen: int = 0
    expert_layers: int = 0

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes of KV of one token, in BF16."""
        return 2 * self.layers * self.kv_values

    @property
    def expert_parameters(self) -> float:
        """Returns the number of parameters of all routed experts: active = rest + chosen / experts of them, and total =
        rest + all of them.
        """
        if not self.experts:
            return 0.0
        return (self.parameters - self.active_parameters) / (1 - self.chosen / self.experts)


GPUS = {
    "A100": Gpu(
        memory_bytes=80e9,
        memory_bytes_s=2.039e12,
        bf16_ops_s=312e12,
        fp8_ops_s=312e12,
        link_bytes_s=300e9,
        source="NVIDIA A100 80GB SXM datasheet (no FP8: as BF16)",
    ),
    "H100": Gpu(
        memory_bytes=80e9,
        memory_bytes_s=3.35e12,
        bf16_ops_s=989e12,
        fp8_ops_s=1979e12,
        link_bytes_s=450e9,
        source="NVIDIA H100 SXM datasheet",
    ),
    "H200": Gpu(
        memory_bytes=141e9,
        memory_bytes_s=4.8e12,
        bf16_ops_s=989e12,
        fp8_ops_s=1979e12,
        link_bytes_s=450e9,
        source="NVIDIA H200 SXM datasheet",
    ),
    "H800": Gpu(
        memory_bytes=80e9,
        memory_bytes_s=3.35e12,
        bf16_ops_s=989e12,
        fp8_ops_s=1979e12,
        link_bytes_s=200e9,
        source="H100 SXM, NVLink cut to 400 GB/s both ways (SpecActor 5.1)",
    ),
    "H20": Gpu(
        memory_bytes=96e9,
        memory_bytes_s=4.0e12,
        bf16_ops_s=148e12,
        fp8_ops_s=296e12,
        link_bytes_s=450e9,
        source="NVIDIA H20 SXM datasheet",
    ),
}

_KV = "2 * KV heads * head size"
MODELS = {
    "Moonlight-16B-A3B": Model(
        parameters=16e9,
        active_parameters=3e9,
        layers=27,
        hidden=2048,
        kv_values=576,
        source="model card and config.json: MLA 512 + 64",
        kv_heads=1,
        experts=64,
        chosen=6,
        expert_layers=26,
    ),
    "Kimi-K2": Model(
        parameters=1.04e12,
        active_parameters=32.6e9,
        layers=61,
        hidden=7168,
        kv_values=576,
        source="technical report and config.json: MLA 512 + 64, FP8 weights",
        kv_heads=1,
        parameter_bytes=1,
        experts=384,
        chosen=8,
        expert_layers=60,
    ),
    "Qwen2-VL-72B": Model(
        parameters=72.7e9,
        active_parameters=72.7e9,
        layers=80,
        hidden=8192,
        kv_values=2048,
        source=f"model card, language part; {_KV} = 2 * 8 * 128",
    ),
    "Qwen2.5-32B": Model(
        parameters=32.5e9,
        active_parameters=32.5e9,
        layers=64,
        hidden=5120,
        kv_values=2048,
        source=f"model card; {_KV} = 2 * 8 * 128",
    ),
    "Qwen3-14B": Model(
        parameters=14.8e9,
        active_parameters=14.8e9,
        layers=40,
        hidden=5120,
        kv_values=2048,
        source=f"model card; {_KV} = 2 * 8 * 128",
    ),
    "Qwen2.5-14B": Model(
        parameters=14.7e9,
        active_parameters=14.7e9,
        layers=48,
        hidden=5120,
        kv_values=2048,
        source=f"model card; {_KV} = 2 * 8 * 128",
    ),
    "Qwen2.5-7B": Model(
        parameters=7.61e9,
        active_parameters=7.61e9,
        layers=28,
        hidden=3584,
        kv_values=1024,
        source=f"model card; {_KV} = 2 * 4 * 128",
        kv_heads=4,
    ),
    "Qwen2.5-7B-Instruct-1M": Model(
        parameters=7.61e9,
        active_parameters=7.61e9,
        layers=28,
        hidden=3584,
        kv_values=1024,
        source=f"model card: contexts to 1,010,000 tokens; {_KV} = 2 * 4 * 128",
        kv_heads=4,
    ),
    "DeepSeek-R1-Distill-Qwen-7B": Model(
        parameters=7.61e9,
        active_parameters=7.61e9,
        layers=28,
        hidden=3584,
        kv_values=1024,
        source="model card: Qwen2.5-Math-7B's architecture",
        kv_heads=4,
    ),
    "Qwen3-8B": Model(
        parameters=8.2e9,
        active_parameters=8.2e9,
        layers=36,
        hidden=4096,
        kv_values=2048,
        source=f"model card; {_KV} = 2 * 8 * 128",
    ),
}

NETWORK_BYTES_S = 50e9
"""Bytes per second of each GPU's network, in one direction: 400 Gbit/s RDMA (SpecActor 5.1; DeepEP's H800 nodes have as
much).
"""

MAX_RUNNING = 1024
"""vLLM 0.32's default of max_num_seqs on GPUs of 70 GB or more, for each data-parallel rank."""

# ---- assumed ---------------------------------------------------------------------------------------------

MEMORY_SHARE = 0.9
"""Share of GPU memory for weights and KV: vLLM 0.32 takes 0.92 by default; assumed that activations and graphs need
0.02.
"""

READ_SHARE = 0.8
"""Assumed share of peak memory bandwidth: streaming kernels on HBM are commonly measured at 75 to 90 %."""

COMPUTE_SHARE = 0.5
"""Assumed share of the dense peak, for products as thin as decoding has and for prefill: tuned training reaches 40 to
55 %.
"""

SEND_SHARE = 0.8
"""Assumed share of a link's bandwidth: DeepEP measures 43 to 47 of 50 GB/s with messages larger than decoding sends."""

STEP_S = 3e-3
"""Assumed seconds per step: schedule, launch captured graphs, sample, return tokens. Published profiles of vLLM's
decode show 2 to 5 ms between forward passes.
"""

REDUCE_S = 15e-6
"""Assumed latency of one all-reduce inside a node; two per layer."""

EXCHANGE_S = 25e-6
"""Assumed latency of one all-to-all between nodes; dispatch and combine per layer of experts."""

START_S, LOAD_BYTES_S = 20.0, 5e9
"""Assumed seconds until a replica is up: process, engine and captured graphs; and the speed of loading its weights, in
bytes per second on each GPU, as from a node's shared NVMe or a peer.
"""

STOP_S = 2.0
"""Assumed seconds until the GPUs of a replica that goes are free: Serve's control loop and the end of its processes."""

FETCH_S = 0.02
"""Assumed seconds before the first byte of KV from the pool: two round trips to its master and a step of the engine."""


def replica_model(
    gpu: str,
    model: str,
    gpus_per_replica: int,
    memory_share: float = MEMORY_SHARE,
    max_running: int = MAX_RUNNING,
    share_attention: bool = False,
) -> ReplicaModel:
    """Returns a replica of `gpus_per_replica` GPUs. Raises ValueError for an unknown name or if the weights do not fit.

    Dense models are split over the GPUs (tensor parallelism). Mixtures of experts on several GPUs split experts and
    requests, `max_running` for each, and keep all other weights on each (expert parallelism with data-parallel
    attention); requests are balanced over them. With `share_attention` they split all weights, and each GPU computes
    every request (tensor parallelism, experts split too). GPUs that share attention divide KV by heads; beyond their
    number they repeat it. Attention's own operations are left out: reading KV takes longer.
    """
    g, m, n = _named(GPUS, gpu, "GPU"), _named(MODELS, model, "model"), gpus_per_replica
    tensor = 1 if m.experts and not share_attention else n
    ranks, kv_parts = n // tensor, min(tensor, m.kv_heads)
    peak_ops_s = (g.fp8_ops_s if m.parameter_bytes == 1 else g.bf16_ops_s) * COMPUTE_SHARE * n
    rest_bytes = (m.parameters - m.expert_parameters) * m.parameter_bytes
    held_bytes = ranks * rest_bytes + m.expert_parameters * m.parameter_bytes
    free_bytes = g.memory_bytes * memory_share * n - held_bytes
    kv_bytes = m.kv_bytes * tensor // kv_parts
    if free_bytes < kv_bytes:
        raise ValueError(f"{model} does not fit on {n} {gpu}: {held_bytes / 1e9:.0f} GB of weights")
    read_bytes_s = g.memory_bytes_s * READ_SHARE
    send_s, send_token_s = _communication(g, m, n, tensor)
    compute_token_s = 2 * m.active_parameters / peak_ops_s
    return ReplicaModel(
        step=StepModel(
            base_s=STEP_S + send_s + rest_bytes / read_bytes_s / tensor,
            token_s=compute_token_s + send_token_s,
            context_s=kv_bytes / (read_bytes_s * n),
            experts_s=m.expert_parameters * m.parameter_bytes / (read_bytes_s * n),
            expert_share=m.chosen / m.experts if m.experts else 0.0,
        ),
        kv_capacity_tokens=int(free_bytes / kv_bytes),
        max_running=max_running * ranks,
        prefill_tokens_s=1 / (compute_token_s + send_token_s),
        fetch_tokens_s=NETWORK_BYTES_S * SEND_SHARE * n / kv_bytes,
        fetch_base_s=FETCH_S,
        start_s=START_S + held_bytes / n / LOAD_BYTES_S,
        stop_s=STOP_S,
        gpus=n,
    )


def from_profile(
    profile: dict, kv_capacity_tokens: int, max_running: int, fetch_tokens_s: float, fetch_base_s: float
) -> ReplicaModel:
    """Returns the engine that `tailrace profile --json` has measured; the pool's speeds come from `bench kvpool`.

    Steps by the profile's fit; prefill by the slope of its least-squares line over prompt lengths.
    """
    fit, prompts = profile["fit"], sorted((int(n), ms) for n, ms in profile["prefill_ms"].items())
    tokens, took_ms = np.array(prompts, np.float64).T
    slope_ms = np.polyfit(tokens, took_ms, 1)[0] if len(prompts) > 1 else took_ms[0] / tokens[0]
    return ReplicaModel(
        step=StepModel(
            base_s=max(fit["base_ms"], 0.0) / 1e3,
            token_s=max(fit["per_token_ms"], 0.0) / 1e3,
            context_s=max(fit["per_context_token_us"], 0.0) / 1e6,
        ),
        kv_capacity_tokens=kv_capacity_tokens,
        max_running=max_running,
        prefill_tokens_s=1e3 / max(float(slope_ms), 1e-6),
        fetch_tokens_s=fetch_tokens_s,
        fetch_base_s=fetch_base_s,
    )


def _communication(g: Gpu, m: Model, n: int, tensor: int) -> tuple[float, float]:
    """Returns the seconds that a step, and each of its tokens, spends in collectives.

    Tensor parallel: two ring all-reduces of `hidden` BF16 values per layer. Experts alone: each token's values go to
    its chosen experts in FP8 and come back in BF16, from each GPU its share of the tokens.
    """
    if n == 1:
        return 0.0, 0.0
    if tensor == 1:
        token_bytes = 3 * m.expert_layers * m.chosen * m.hidden / n
        return 2 * m.expert_layers * EXCHANGE_S, token_bytes / (NETWORK_BYTES_S * SEND_SHARE)
    token_bytes = 2 * m.layers * 2 * (n - 1) / n * 2 * m.hidden
    return 2 * m.layers * REDUCE_S, token_bytes / (g.link_bytes_s * SEND_SHARE)


def _named(table: dict, name: str, kind: str):
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; {nearest(table, name)}")
    return table[name]


def nearest(table: dict, name: str) -> str:
    """Returns the names of a table that are nearest to this one, all of them if none is, in words."""
    return f"nearest: {', '.join(get_close_matches(name, table, cutoff=0.3) or list(table))}"
