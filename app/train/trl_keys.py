"""Settings of `trl.GRPOConfig` that a file adds under `trl`, checked without importing TRL: before a service starts."""

from collections.abc import Mapping
from typing import Any

from tailrace.deployments.declared_fields import declared_fields, fitted
from tailrace.deployments.keyed_error import KeyedError

GRPO_CONFIG = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
)
"""The class and its bases: package, file, name."""

OURS = (
    "output_dir", "max_steps", "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "learning_rate", "seed",
    "repetition_penalty", "generation_kwargs", "use_vllm", "disable_dropout", "vllm_importance_sampling_correction",
    "ignore_data_skip", "logging_strategy", "logging_steps", "save_strategy", "save_steps", "disable_tqdm", "use_cpu",
)  # fmt: skip
"""Settings that the run itself sets, see `trl_settings.settings_of`."""

NOT_BY_GROUPS = {
    "scale_rewards": (("batch",), "advantages are computed group by group; use group or none"),
    "multi_objective_aggregation": (("normalize_then_sum",), "advantages are computed group by group"),
    "use_adaptive_entropy": ((True,), "its coefficient would change between the groups of a step"),
    "num_iterations": (range(2, 1 << 30), "a step's samples are used once"),
}
"""Settings that a trainer fed group by group does not support: values, and the reason."""

LOSSES_OVER_ALL_TOKENS = ("dapo", "cispo", "vespo")
"""TRL's loss types that divide by the tokens of the whole step (`_compute_loss`, TRL 1.16)."""

DEFAULT_LOSS = "dapo"
"""TRL's default loss, 1.16."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings, as values of their types. All names pass if TRL is not installed.

    Raises KeyedError for unknown settings, for those of the run, and for unsupported ones.
    """
    for key in given:
        if key in OURS:
            raise KeyedError(key, "the run sets it itself; see the other keys of the file")
    found = fitted(given, declared_fields(*GRPO_CONFIG), "trl.GRPOConfig") if given else {}
    for key, value in found.items():
        refused, reason = NOT_BY_GROUPS.get(key, ((), ""))
        if value in refused:
            raise KeyedError(key, f"{value!r}: {reason}")
    return found
