"""Settings of `trl.GRPOConfig`: those that follow from a run's own, defaults, and those that a file adds."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from trl import GRPOConfig

from tailrace.app.errors import BadInput
from tailrace.app.train.config import TrainConfig
from tailrace.app.train.group_trainer import LOSSES_OVER_ALL_TOKENS

NOT_BY_GROUPS = {
    "scale_rewards": (("batch",), "advantages are computed group by group; use group or none"),
    "multi_objective_aggregation": (("normalize_then_sum",), "advantages are computed group by group"),
    "use_adaptive_entropy": ((True,), "its coefficient would change between the groups of a step"),
    "num_iterations": (range(2, 1 << 30), "a step's samples are used once"),
}
"""Settings that a trainer fed group by group cannot honour: values, and the reason."""


def trl_settings(config: TrainConfig, ours: dict[str, Any]) -> dict[str, Any]:
    """Ours, and those of the file. Raises BadInput for unknown ones, ours, and those that cannot be honoured."""
    known = {field.name for field in fields(GRPOConfig)}
    for key, value in config.trl.items():
        refused, reason = NOT_BY_GROUPS.get(key, ((), ""))
        if value in refused:
            raise BadInput(f"trl.{key}: {value!r}: {reason}")
        if key in ours:
            raise BadInput(f"trl.{key}: the run sets it itself; see the other keys of the file")
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadInput(f"trl.{key}: trl.GRPOConfig has no such field{hint}")
    loss_type = config.trl.get("loss_type", GRPOConfig.loss_type)
    if config.trainer.samples_per_pass is not None and loss_type not in LOSSES_OVER_ALL_TOKENS:
        raise BadInput(
            f"trainer.samples_per_pass: trl.loss_type {loss_type} is a mean over a group's samples; "
            f"use {', '.join(LOSSES_OVER_ALL_TOKENS)}, or leave samples_per_pass out"
        )
    return ours | config.trl


def settings_of(config: TrainConfig, checkpoints: str) -> dict[str, Any]:
    """Those that follow from the run's: one group a backward pass, one batch a step.

    The rollout's logprobs have floating-point noise, so no loss on weights that made the samples is to depend on
    them: there is no importance-sampling correction. With other weights, they are the old logprobs themselves.
    """
    return {
        "output_dir": checkpoints,
        "max_steps": config.steps,
        "num_generations": config.samples,
        "per_device_train_batch_size": config.samples,
        "gradient_accumulation_steps": config.groups,
        "steps_per_generation": config.groups,
        "max_completion_length": config.max_tokens,
        "temperature": config.sampling.temperature,
        "top_p": config.sampling.top_p,
        "top_k": config.sampling.top_k,
        "min_p": config.sampling.min_p or None,
        "learning_rate": config.learning_rate,
        "seed": config.seed,
        "use_vllm": False,
        "disable_dropout": True,  # a gradient is a function of weights and samples
        "vllm_importance_sampling_correction": False,
        "ignore_data_skip": True,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": config.checkpoint_every,
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }


def defaults() -> dict[str, Any]:
    """Those that a file may change with `trl`."""
    return {
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_total_limit": 2,
    }
