"""Settings of `trl.GRPOConfig`: those that follow from a run's own, and defaults. See `trl_keys.py` for a file's."""

from typing import Any

import torch

from tailrace.app.train.train_config import TrainConfig


def settings_of(config: TrainConfig, checkpoints: str) -> dict[str, Any]:
    """Returns the settings that follow from the run's: one group a backward pass, one batch a step.

    The rollout's logprobs have floating-point noise, so no loss on weights that made the samples may depend on them:
    there is no importance-sampling correction. With other weights, they are the old logprobs themselves.
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
        "repetition_penalty": 1.0,  # the service samples without, and without those of `generation_kwargs`
        "generation_kwargs": None,
        "learning_rate": config.learning_rate,
        "seed": config.seed,
        "use_vllm": False,
        "disable_dropout": True,  # a gradient is a function of weights and samples
        "vllm_importance_sampling_correction": False,
        "ignore_data_skip": True,
        "logging_strategy": "steps",  # a row of the ledger is made from each log
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": config.checkpoint_every,
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }


def defaults() -> dict[str, Any]:
    """Returns the settings that a file may change with `trl`."""
    return {
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_total_limit": 2,
    }
