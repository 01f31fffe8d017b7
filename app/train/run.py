"""A run of the learner: TRL's GRPO trainer over samples of the service, step by step, into a folder.

A run that is stopped continues from its last checkpoint. Groups that had ended since are taken from the folder, and
tokens are functions of keys, so the weights come out the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from tailrace.app.client import RolloutClient
from tailrace.app.model import resolve_model
from tailrace.app.train.config import TrainConfig, trl_settings
from tailrace.app.train.evaluation import Accuracy, accuracy
from tailrace.app.train.record.ledger import LedgerRow
from tailrace.app.train.rewards import RewardPool
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.step_recorder import StepRecorder
from tailrace.app.train.step_rewards import StepRewards
from tailrace.app.train.record.stored_groups import StoredGroups
from tailrace.app.train.task import Question, Task
from tailrace.app.trl.generation import attach


@dataclass(frozen=True)
class TrainingResult:
    """`accuracies`: on held-out questions, by step; empty if none are held out."""

    rows: list[LedgerRow]
    accuracies: list[Accuracy]


def train(
    client: RolloutClient, config: TrainConfig, task: Task, folder: RunFolder, say: Callable[[str], None]
) -> TrainingResult:
    """Train to `config.steps`, counted over all starts. Raises BadInput for settings that TRL does not take."""
    ledger, accuracies = RowFile(folder.ledger, LedgerRow), RowFile(folder.accuracies, Accuracy)
    begun, checkpoint = folder.last_checkpoint() or (0, None)
    for file in (ledger, accuracies):
        file.truncate_after(begun)
    if begun >= config.steps:
        return TrainingResult(ledger.rows, accuracies.rows)
    pool = RewardPool(config.task, config.rewards.workers, config.rewards.timeout_s)
    try:
        run = _Run(
            client=client,
            config=config,
            task=task,
            folder=folder,
            pool=pool,
            ledger=ledger,
            accuracies=accuracies,
            say=say,
        )
        run.go(str(checkpoint) if checkpoint else None)
    finally:
        pool.close()
    return TrainingResult(ledger.rows, accuracies.rows)


class _Run:
    def __init__(self, *, client, config, task, folder, pool, ledger, accuracies, say):
        self._client, self._config, self._pool = client, config, pool
        self._held_out, self._accuracies, self._say = task.held_out, accuracies, say
        model = str(resolve_model(config.model))
        tokenizer = AutoTokenizer.from_pretrained(model)
        rewards = StepRewards(pool, client, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
        self._trainer = GRPOTrainer(
            model,
            reward_funcs=rewards.reward,
            args=GRPOConfig(**defaults() | trl_settings(config, settings_of(config, folder))),
            train_dataset=Dataset.from_list([_row(question) for question in task.train]),
            processing_class=tokenizer,
        )
        for callback in (PrinterCallback, ProgressCallback):
            self._trainer.remove_callback(callback)
        rewards.know(self._by_tokens(task.train))
        stored = StoredGroups(folder.rollouts, client.rollout_blocking, lambda: self._rollout.weights_digest)
        self._rollout = attach(
            self._trainer,
            client,
            weights_dir=folder.weights,
            seed=config.seed,
            on_group=rewards.begin,
            groups_of=stored.groups_of,
        )
        recorder = StepRecorder(
            config=config,
            trainer=self._trainer,
            rollout=self._rollout,
            rewards=rewards,
            ledger=ledger,
            after_step=self._after_step,
            say=say,
        )
        self._trainer.add_callback(recorder)

    def go(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            self._evaluate(0)
        else:
            self._say(f"continuing from {checkpoint}")
        self._trainer.train(resume_from_checkpoint=checkpoint)

    def _after_step(self, step: int) -> None:
        every = self._config.evaluate_every
        if step == self._config.steps or (every and step % every == 0):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        if not self._held_out:
            return
        self._rollout.send_weights()
        prompts = self._tokens_of(self._held_out)
        found = accuracy(self._client, self._pool, self._held_out, prompts, step, self._config.max_tokens)
        self._accuracies.append(found)
        value = f"{found.mean:.3f} +- {found.standard_error:.3f}"
        self._say(f"step {step}: accuracy on {found.questions} held-out questions {value}")

    def _tokens_of(self, questions: tuple[Question, ...]) -> list[list[int]]:
        return self._trainer._tokenize_prompts([question.prompt for question in questions])[0]

    def _by_tokens(self, questions: tuple[Question, ...]) -> dict[tuple[int, ...], Question]:
        return {tuple(ids): each for ids, each in zip(self._tokens_of(questions), questions, strict=True)}


def _row(question: Question) -> dict:
    return {"prompt": question.prompt, "question_id": question.question_id}


def settings_of(config: TrainConfig, folder: RunFolder) -> dict:
    """Settings of `trl.GRPOConfig` that follow from the run's: one group a backward pass, one batch a step."""
    return {
        "output_dir": str(folder.checkpoints),
        "max_steps": config.steps,
        "num_generations": config.samples,
        "per_device_train_batch_size": config.samples,
        "gradient_accumulation_steps": config.groups,
        "max_completion_length": config.max_tokens,
        "temperature": config.sampling.temperature,
        "top_p": config.sampling.top_p,
        "top_k": config.sampling.top_k,
        "min_p": config.sampling.min_p or None,
        "learning_rate": config.learning_rate,
        "seed": config.seed,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": config.checkpoint_every,
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }


def defaults() -> dict:
    """Settings of `trl.GRPOConfig` that a file may change with `trl`."""
    return {
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_total_limit": 2,
    }
