"""TRL's real `AsyncGRPOTrainer` in tests: its arguments on a CPU, its log, and the samples that it draws."""

from pathlib import Path

from trl.experimental.async_grpo import AsyncGRPOConfig

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SAMPLES, TOKENS = 4, 6


def arguments(tmp_path, **settings):
    settings = {"max_steps": 3, "max_staleness": 1, "token_budget": 0, "learning_rate": 1e-3} | settings
    return AsyncGRPOConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=2 * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        seed=7,
        **settings,
    )


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def watched(trainer):
    """The samples that the trainer draws, with the numbers of its weights at that time."""
    drawn, worker = [], trainer.rollout_worker
    get = worker.rollout_buffer.get

    def recorded(*args, **kwargs):
        sample = get(*args, **kwargs)
        drawn.append((sample, trainer.model_version))
        return sample

    worker.rollout_buffer.get = recorded
    return drawn
