"""A trainer's callback that writes the ledger: a row a step, made from TRL's metrics and the service's results."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from transformers import TrainerCallback

from tailrace.app.train.feed.step_feed import StepFeed
from tailrace.app.train.record.checksum import weights_checksum
from tailrace.app.train.record.ledger import LedgerRow, Seconds, Staleness
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.record.sent_weights import SentWeights, staleness
from tailrace.app.train.replica_seconds import ReplicaSeconds
from tailrace.app.train.step_rewards import RewardedStep, StepRewards
from tailrace.app.train.train_config import TrainConfig


class RunFiles(NamedTuple):
    """The files that grow with a run: a row for each update of the weights, and for each step."""

    sent: RowFile[SentWeights]
    ledger: RowFile[LedgerRow]


class StepRecorder(TrainerCallback):
    """`after_step`: called with the number of each step that is in the ledger."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        trainer,
        feed: StepFeed,
        rewards: StepRewards,
        replicas: ReplicaSeconds,
        files: RunFiles,
        after_step: Callable[[int], None],
        say: Callable[[str], None],
    ):
        self._config, self._trainer, self._feed, self._rewards = config, trainer, feed, rewards
        self._replicas, self._after_step, self._say = replicas, after_step, say
        self._sent, self._ledger = files

    def on_step_begin(self, args, state, control, **_):
        self._started, self._cpu_s = time.monotonic(), time.process_time()
        self._replicas.take()
        self._feed.take_seconds()

    def on_step_end(self, args, state, control, **_):
        self._step_s, self._cpu_s = time.monotonic() - self._started, time.process_time() - self._cpu_s
        self._spent = self._feed.take_seconds()  # before `settle`, whose wait is no part of the step
        self._replica_s, self._rewarded = self._replicas.take(), self._rewards.take()
        self._staleness = self._staleness_of(state.global_step - 1, self._rewarded)
        metrics = self._trainer._metrics["train"]  # of TRL's own log, for `report_to`
        for part, value in self._staleness.model_dump().items():
            metrics[f"staleness/{part}"].append(value)
        if state.global_step == self._config.steps:
            control.should_save = True
        if control.should_save:
            self._feed.settle()  # a run that continues here finds the samples that have begun on disk

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" not in (logs or {}):
            return
        row = self._row(state.global_step, logs)
        self._ledger.append(row)
        parts = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in row.seconds if kind != "step" and seconds)
        self._say(
            f"step {row.step}/{self._config.steps}: reward {row.reward_mean:.3f}, {row.tokens} tokens, "
            f"{row.seconds.step:.1f} s ({parts})"
        )
        self._after_step(row.step)

    def _staleness_of(self, updates: int, rewarded: RewardedStep) -> Staleness:
        """Returns the staleness of a step's samples, which are used after so many updates."""
        ended_at = {asked: self._feed.ended_at.pop(asked) for asked in rewarded.groups}
        ended = [ended_at[asked] for asked, of in rewarded.groups.items() for _ in of.samples]
        samples = [sample for group in rewarded.groups.values() for sample in group.samples]
        return staleness(self._sent, updates, samples, ended)

    def _row(self, step: int, logs: dict) -> LedgerRow:
        rewarded, mismatch = self._rewarded, self._trainer.mismatch
        samples = [sample for group in rewarded.groups.values() for sample in group.samples]
        up, idle, given_back = self._replica_s
        mean, spread = moments(rewarded)
        return LedgerRow(
            step=step,
            weights_checksum=weights_checksum(self._trainer.model),
            groups=self._config.groups,
            samples=len(samples),
            tokens=sum(len(sample.token_ids) for sample in samples),
            taken=self._feed.taken,
            longest=self._rewards.longest(rewarded),
            reward_mean=mean,
            reward_std=spread,
            rewards_failed=rewarded.outcomes["failed"],
            rewards_timed_out=rewarded.outcomes["timed_out"],
            groups_without_gradient=self._trainer.groups_without_gradient,
            loss=logs["loss"],
            grad_norm=logs["grad_norm"],
            staleness=self._staleness,
            logprob_kl=mismatch.kl,
            logprob_difference_max=mismatch.greatest,
            drafted_tokens=sum(sample.drafted_tokens for sample in samples),
            accepted_tokens=sum(sample.accepted_tokens for sample in samples),
            verifications=sum(sample.verifications for sample in samples),
            trainer_cpu_s=self._cpu_s,
            replica_s=up,
            idle_replica_s=idle,
            given_back_s=given_back,
            seconds=self._seconds(rewarded),
        )

    def _seconds(self, rewarded: RewardedStep) -> Seconds:
        known = {
            "rollout": self._spent["rollout"],
            "weights": self._spent["weights"],
            "rewards": rewarded.waited_s,
        }
        return Seconds(step=self._step_s, train=self._step_s - sum(known.values()), **known)


def moments(rewarded: RewardedStep) -> tuple[float, float]:
    """Returns mean and standard deviation of a step's rewards; the same bits in whatever order the groups came."""
    values = [value for asked in sorted(rewarded.values) for value in rewarded.values[asked]]
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
