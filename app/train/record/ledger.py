"""A row of the ledger: one step of training in figures."""

from pydantic import BaseModel, ConfigDict


class Seconds(BaseModel):
    """Seconds of one step by kind of work. `rewards`: waited for after the rollout. `train`: the rest."""

    model_config = ConfigDict(frozen=True)
    step: float
    rollout: float
    rewards: float
    weights: float
    train: float


class LedgerRow(BaseModel):
    """Steps count from 1. `weights_checksum`: of all parameters after the step. Failed and late rewards count as 0."""

    model_config = ConfigDict(frozen=True)
    step: int
    weights_checksum: str
    groups: int
    samples: int
    tokens: int
    reward_mean: float
    reward_std: float
    rewards_failed: int
    rewards_timed_out: int
    loss: float
    grad_norm: float
    logprob_difference_max: float
    importance_ratio_mean: float
    drafted_tokens: int
    accepted_tokens: int
    verifications: int
    seconds: Seconds
