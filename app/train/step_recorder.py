"""A trainer's callback that writes the ledger: a row a step, made from TRL's metrics and the service's results."""

import time
from collections.abc import Callable

from transformers import TrainerCallback

from tailrace.app.train.record.checksum import weights_checksum
from tailrace.app.train.config import TrainConfig
from tailrace.app.train.record.ledger import LedgerRow, Seconds
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.step_rewards import StepRewards
from tailrace.app.trl.step_rollout import StepRollout


class StepRecorder(TrainerCallback):
    """`after_step`: called with the number of each step that is in the ledger."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        trainer,
        rollout: StepRollout,
        rewards: StepRewards,
        ledger: RowFile[LedgerRow],
        after_step: Callable[[int], None],
        say: Callable[[str], None],
    ):
        self._config, self._trainer, self._rollout, self._rewards = config, trainer, rollout, rewards
        self._ledger, self._after_step, self._say = ledger, after_step, say

    def on_step_begin(self, args, state, control, **_):
        self._started = time.monotonic()
        self._rollout.seconds.clear()

    def on_step_end(self, args, state, control, **_):
        self._step_s = time.monotonic() - self._started
        if state.global_step == self._config.steps:
            control.should_save = True

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" not in (logs or {}):
            return
        row = self._row(state.global_step, logs)
        self._ledger.append(row)
        parts = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in row.seconds if kind != "step")
        self._say(
            f"step {row.step}/{self._config.steps}: reward {row.reward_mean:.3f}, {row.tokens} tokens, "
            f"{row.seconds.step:.1f} s ({parts})"
        )
        self._after_step(row.step)

    def _row(self, step: int, logs: dict) -> LedgerRow:
        rewards, spent = self._rewards.take(), self._rollout.seconds
        known = spent["rollout"] + spent["weights"] + rewards.waited_s
        samples = rewards.samples
        return LedgerRow(
            step=step,
            weights_checksum=weights_checksum(self._trainer.model),
            groups=self._config.groups,
            samples=len(samples),
            tokens=sum(len(sample.token_ids) for sample in samples),
            reward_mean=logs["reward"],
            reward_std=logs["reward_std"],
            rewards_failed=rewards.outcomes["failed"],
            rewards_timed_out=rewards.outcomes["timed_out"],
            loss=logs["loss"],
            grad_norm=logs["grad_norm"],
            logprob_difference_max=logs["sampling/sampling_logp_difference/max"],
            importance_ratio_mean=logs["sampling/importance_sampling_ratio/mean"],
            drafted_tokens=sum(sample.drafted_tokens for sample in samples),
            accepted_tokens=sum(sample.accepted_tokens for sample in samples),
            verifications=sum(sample.verifications for sample in samples),
            seconds=Seconds(
                step=self._step_s,
                rollout=spent["rollout"],
                rewards=rewards.waited_s,
                weights=spent["weights"],
                train=self._step_s - known,
            ),
        )
