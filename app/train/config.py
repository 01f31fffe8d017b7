"""`train.yaml` as a strict model. Errors are BadInput, one line, with the dotted key."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from tailrace.app.config import first_error
from tailrace.app.deployment_settings import StrictModel
from tailrace.app.errors import BadInput
from tailrace.app.strict_yaml import read_yaml
from tailrace.app.train.task import TaskConfig
from tailrace.deployments.messages.rollout import SamplingParams

MAY_CHANGE = ("steps", "checkpoint_every", "evaluate_every", "rewards")
"""Keys that a run may change when it is continued."""


class RewardsConfig(StrictModel):
    workers: int = Field(1, ge=1, description="processes")
    timeout_s: float = Field(10.0, gt=0, description="seconds for one reward")


class TrainConfig(StrictModel):
    model: str = Field("demo", description="demo, or a local Hugging Face folder")
    task: TaskConfig
    steps: int = Field(100, ge=1)
    groups: int = Field(8, ge=1, description="questions of a step")
    samples: int = Field(8, ge=2, description="samples of a question (G)")
    max_tokens: int = Field(64, ge=1, description="of one sample")
    sampling: SamplingParams = SamplingParams()
    learning_rate: float = Field(1e-6, gt=0)
    seed: int = Field(0, ge=0, description="of the order of questions and of every sample key")
    checkpoint_every: int = Field(10, ge=1, description="steps")
    evaluate_every: int | None = Field(None, ge=1, description="steps; null: before and after training alone")
    rewards: RewardsConfig = RewardsConfig()
    trl: dict[str, Any] = Field(
        default_factory=dict, description="further settings of trl.GRPOConfig, such as report_to"
    )

    @field_validator("sampling")
    @classmethod
    def _no_stop_tokens(cls, value: SamplingParams) -> SamplingParams:
        if value.stop_token_ids:
            raise ValueError("stop_token_ids: TRL's loss counts on the model's own end-of-sequence token alone")
        return value


def read_train_config(path: Path) -> TrainConfig:
    """Raises BadInput, one line, that names the file and the key."""
    try:
        return TrainConfig.model_validate(read_yaml(path))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise BadInput(f"{path}: {first_error(error, TrainConfig)}") from error
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error


def trl_settings(config: TrainConfig, ours: dict[str, Any]) -> dict[str, Any]:
    """Settings of `trl.GRPOConfig`: ours, and those of the file. Raises BadInput for unknown ones, and for ours."""
    from dataclasses import fields

    from trl import GRPOConfig

    known = {field.name for field in fields(GRPOConfig)}
    for key in config.trl:
        if key in ours:
            raise BadInput(f"trl.{key}: the run sets it itself; see the other keys of the file")
        if key not in known:
            near = get_close_matches(key, known, n=1)
            raise BadInput(
                f"trl.{key}: trl.GRPOConfig has no such field" + (f"; did you mean {near[0]}?" if near else "")
            )
    return ours | config.trl
