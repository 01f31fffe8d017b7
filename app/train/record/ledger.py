"""A row of the ledger: one step of training in figures."""

from pydantic import BaseModel, ConfigDict


class Seconds(BaseModel):
    """Seconds of one step, by the trainer's activity; they add up to `step`.

    `rollout`: waiting for samples. `rewards`: waiting for rewards. `weights`: sending weights. `train`: all else.
    """

    model_config = ConfigDict(frozen=True)
    step: float
    rollout: float
    rewards: float
    weights: float
    train: float


class Staleness(BaseModel):
    """Updates of the weights between a token and its use, over the tokens of a step. `in_flight`, `in_queue`: the parts
    of `mean` that came before and after the token's group had ended; both are 0 in ledgers that do not have them.
    """

    model_config = ConfigDict(frozen=True)
    mean: float
    max: int
    in_flight: float = 0.0
    in_queue: float = 0.0


class LedgerRow(BaseModel):
    """Steps count from 1. `weights_checksum`: checksum of all parameters after the step. Failed and late rewards count
    as 0.

    `taken`: step and place of the question of each group, in the mode `bounded_groups`; in others they are its own.
    `longest`: tokens of the longest sample of each question, by its id. `groups_without_gradient`: groups whose answers
    all had the same reward; no backward pass was run for them. `trainer_cpu_s`: core seconds of the trainer's process.
    `replica_s`: seconds of engine replicas that were up; `idle_replica_s`: those without an engine step;
    `given_back_s`: seconds of replicas that were up in this run and were given back. `logprob_kl`,
    `logprob_difference_max`: trainer's logprobs against the rollout's.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")  # null would not be read again
    step: int
    weights_checksum: str
    groups: int
    samples: int
    tokens: int
    taken: tuple[tuple[int, int], ...] = ()
    longest: dict[str, int]
    reward_mean: float
    reward_std: float
    rewards_failed: int
    rewards_timed_out: int
    groups_without_gradient: int = 0
    loss: float
    grad_norm: float
    staleness: Staleness
    logprob_kl: float
    logprob_difference_max: float
    drafted_tokens: int
    accepted_tokens: int
    verifications: int
    trainer_cpu_s: float
    replica_s: float
    idle_replica_s: float
    given_back_s: float
    seconds: Seconds
