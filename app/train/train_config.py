"""`train.yaml` as a strict model. Errors are BadInput, one line, with the dotted key."""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from tailrace.app.config import first_error
from tailrace.app.deployment_settings import StrictModel
from tailrace.app.errors import BadInput
from tailrace.app.strict_yaml import read_yaml
from tailrace.app.train.feed.modes import Mode
from tailrace.app.train.question_order import QuestionOrderName
from tailrace.app.train.task import TaskConfig
from tailrace.app.train.trl_keys import DEFAULT_LOSS, LOSSES_OVER_ALL_TOKENS, checked
from tailrace.deployments.messages.rollout import SamplingParams

MAY_CHANGE = ("steps", "checkpoint_every", "evaluate_every", "evaluate_samples", "weights_dir", "rewards", "trainer")
"""Keys that a run may change when it is continued."""


class RewardsConfig(StrictModel):
    workers: int = Field(1, ge=1, description="processes")
    timeout_s: float = Field(10.0, gt=0, description="seconds for one reward")


class TrainerConfig(StrictModel):
    workers: int | None = Field(
        None, ge=1, description="backward passes at a time; null: as many as cores have room for, and one on a GPU"
    )
    threads: int = Field(1, ge=1, description="of torch, for each pass; with another number, sums round otherwise")
    shares_cores: bool = Field(
        False, description="engines have the same cores: compute gradients at idle priority, so that engines go first"
    )
    samples_per_pass: int | None = Field(
        None, ge=1, description="of a group, in one backward pass: shorter ones are padded less; null: all"
    )
    max_held_gradients: int = Field(
        0, ge=0, description="groups that may be computed before their turn; each takes the memory of all gradients"
    )


class TrainConfig(StrictModel):
    model: str = Field("demo", description="demo, or a local Hugging Face folder")
    task: TaskConfig
    steps: int = Field(100, ge=1)
    groups: int = Field(8, ge=1, description="questions of a step")
    samples: int = Field(8, ge=2, description="samples of a question (G)")
    max_tokens: int = Field(64, ge=1, description="of one sample")
    sampling: SamplingParams = SamplingParams()
    mode: Mode = Field(Mode.OVERLAP, description="sync, overlap, one_step_off, bounded or bounded_groups")
    max_staleness: int = Field(
        2, ge=1, description="of bounded and bounded_groups: updates between a sample's begin and its use"
    )
    order: QuestionOrderName = Field(
        QuestionOrderName.SHUFFLE,
        description="shuffle, or by_length: from the second epoch on, a step's questions had answers of like length",
    )
    learning_rate: float = Field(1e-6, gt=0)
    seed: int = Field(0, ge=0, description="of the order of questions and of every sample key")
    checkpoint_every: int = Field(10, ge=1, description="steps")
    evaluate_every: int | None = Field(None, ge=1, description="steps; null: before and after training alone")
    evaluate_samples: int = Field(
        4, ge=0, description="answers to each held-out question, drawn as in training; a greedy one comes too"
    )
    weights_dir: Path | None = Field(
        None, description="a folder that all nodes see, for the trainer's weights; null: through memory"
    )
    rewards: RewardsConfig = RewardsConfig()
    trainer: TrainerConfig = TrainerConfig()
    trl: dict[str, Any] = Field(
        default_factory=dict, description="further settings of trl.GRPOConfig, such as report_to"
    )

    @field_validator("sampling")
    @classmethod
    def _as_trained(cls, value: SamplingParams) -> SamplingParams:
        if not value.temperature:
            raise ValueError("temperature 0: all samples of a question would be equal, and nothing be learnt")
        if value.stop_token_ids:
            raise ValueError("stop_token_ids: TRL's loss counts on the model's own end-of-sequence token alone")
        if value.stop or value.ignore_eos or value.changes_logits or value.wants_more:
            raise ValueError("TRL's loss knows temperature, top_p, top_k and min_p alone; remove the others")
        return value

    _trl = field_validator("trl")(checked)

    @model_validator(mode="after")
    def _parts_of_a_group(self):
        loss_type = self.trl.get("loss_type", DEFAULT_LOSS)
        if self.trainer.samples_per_pass is not None and loss_type not in LOSSES_OVER_ALL_TOKENS:
            raise ValueError(
                f"trainer.samples_per_pass: trl.loss_type {loss_type} is a mean over a group's samples; "
                f"use {', '.join(LOSSES_OVER_ALL_TOKENS)}, or leave samples_per_pass out"
            )
        return self


def read_train_config(path: Path) -> TrainConfig:
    """Reads the configuration. Raises BadInput, one line, that names the file and the key."""
    try:
        return TrainConfig.model_validate(read_yaml(path))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise BadInput(f"{path}: {first_error(error, TrainConfig)}") from error
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error
