"""Seconds of training, rewards and weights, from published figures; each has its source, or the reason for an
assumption.

Training takes operations / (GPUs * peak * share). Operations for each parameter and token are 6 for the gradient; modes
that compute old logprobs again add 2 for that pass. No figure is fitted to a result. Called by the training host.
"""

from dataclasses import dataclass

from tailrace.lab.simulator.hardware import GPUS, MODELS
from tailrace.lab.simulator.scenario import Known, Scenario, ScenarioModel


class TrainingFigures(ScenarioModel):
    """Figures that all scenarios have in common. Shares are from 0 to 1; seconds are those of the simulated clock."""

    compute_share: Known[float] = Known(
        value=0.4, source="Llama 3 report (arXiv 2407.21783), table 4: 38 to 43 % of BF16 peak on H100, dense"
    )
    gradient_ops: Known[int] = Known(value=6, source="operations a parameter and token, forward and backward: 2 + 4")
    logprob_ops: Known[int] = Known(
        value=2,
        assumed="one forward pass for old logprobs, as verl makes by default; `tailrace train` makes none: a step has "
        "one update, and off-policy the rollout's own logprobs are the old ones; a reference model would add one",
    )
    piece_tokens: Known[int] = Known(
        value=4096, assumed="of a GPU, below which a micro-batch would waste it: gradients begin with no fewer tokens"
    )
    weights_bytes_s: Known[float] = Known(
        value=9.4e9,
        source="of a GPU: checkpoint-engine 0.4.2 sends Qwen3-235B in BF16 to 8 H800 in 6.22 s, so 470 GB / 8 / 6.22",
    )
    weights_base_s: Known[float] = Known(
        value=0.5, assumed="names and shapes are agreed upon, and caches reset: checkpoint-engine's gathering takes 0.3"
    )
    switch_s: Known[float] = Known(
        value=3.0,
        assumed="GPUs that roll out and train by turns, once a step: KV is freed and made, the optimizer's state comes "
        "and goes; vLLM's sleep and wake-up take 1 to 3 s",
    )
    reward_s: Known[float] = Known(value=0.05, assumed="of a sample on one core: a checked answer, no model judges it")
    reward_workers: Known[int] = Known(value=16, assumed="processes for each node of GPUs")
    train_share: Known[float] = Known(
        value=0.5,
        source="of the GPUs where training has its own: verl's fully asynchronous recipe has 64 of 128; RhymeRL 7 has "
        "128 GPUs in all, and does not say how they are divided",
    )
    ranking_groups: Known[int] = Known(
        value=16, source="RhymeRL 7.2.3, for mathematics; no more than half of the replicas, where it has more"
    )
    epoch_steps: Known[int] = Known(
        value=16, assumed="steps until a prompt comes again: RhymeRL 7 has 8 K prompts, at 512 a step"
    )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of one scenario in seconds. `token_gpu_s`: GPU-seconds of training on a token. `load_s`: seconds to load
    weights into a replica. `piece_tokens`: minimum tokens of a gradient's piece on each GPU.
    """

    token_gpu_s: float
    piece_tokens: int
    load_s: float
    switch_s: float
    reward_sample_s: float

    @classmethod
    def of(cls, scenario: Scenario, figures: TrainingFigures, gpus: int, old_logprobs: bool) -> "StepCosts":
        """Returns the costs. `gpus`: GPUs of the whole cluster, whose nodes compute rewards. `old_logprobs`: whether
        the trainer computes old logprobs again.
        """
        gpu, model = GPUS[scenario.gpu.value], MODELS[scenario.model.value]
        passes = figures.gradient_ops.value + figures.logprob_ops.value * old_logprobs
        ops = passes * model.active_parameters
        replica_bytes = model.parameters * model.parameter_bytes / scenario.gpus_per_replica.value
        nodes = max(gpus / scenario.gpus_per_node.value, 1.0)
        return cls(
            token_gpu_s=ops / (gpu.bf16_ops_s * figures.compute_share.value),
            piece_tokens=figures.piece_tokens.value,
            load_s=figures.weights_base_s.value + replica_bytes / figures.weights_bytes_s.value,
            switch_s=figures.switch_s.value,
            reward_sample_s=figures.reward_s.value / (figures.reward_workers.value * nodes),
        )
