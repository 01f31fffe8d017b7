"""A row of the ledger, from a step's callbacks."""

import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import torch
from torch import nn

from tailrace.app.train import step_recorder
from tailrace.app.train.feed.step_feed import StepFeed
from tailrace.app.train.logprob_mismatch import LogprobMismatch
from tailrace.app.train.record.ledger import LedgerRow, Seconds
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.record.sent_weights import SentWeights
from tailrace.app.train.step_rewards import RewardedStep


class Feed(StepFeed):
    """A feed without samples. Samples ahead of the trainer take a minute to end."""

    def __init__(self):
        self._seconds, self.taken = Counter(), ()

    def spend(self, **seconds: float) -> None:
        self._seconds.update(seconds)

    def settle(self) -> None:
        self.spend(rollout=60.0)


def test_the_wait_for_samples_ahead_at_a_checkpoint_is_no_part_of_the_step(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=iter((0.0, 9.0, 100.0, 109.0)).__next__, process_time=lambda: 0.0)
    monkeypatch.setattr(step_recorder, "time", clock)
    ledger, feed = RowFile(tmp_path / "ledger.jsonl", LedgerRow), Feed()
    rewarded = RewardedStep(values={(0, 0): [1.0]}, waited_s=1.0)
    recorder = step_recorder.StepRecorder(
        config=SimpleNamespace(steps=9, groups=1),
        trainer=SimpleNamespace(
            _metrics={"train": defaultdict(list)},
            mismatch=SimpleNamespace(kl=0.0, greatest=0.0),
            model=nn.Linear(1, 1),
            groups_without_gradient=0,
        ),
        feed=feed,
        rewards=SimpleNamespace(take=lambda: rewarded, longest=lambda rewarded: {}),
        replicas=SimpleNamespace(take=lambda: (0.0, 0.0, 0.0)),
        files=step_recorder.RunFiles(RowFile(tmp_path / "weights.jsonl", SentWeights), ledger),
        after_step=lambda step: feed.spend(weights=30.0),
        say=lambda text: None,
    )
    for step, is_saved in ((1, True), (2, False)):
        state, control = SimpleNamespace(global_step=step), SimpleNamespace(should_save=is_saved)
        recorder.on_step_begin(None, state, control)
        feed.spend(rollout=2.0, weights=3.0)
        recorder.on_step_end(None, state, control)
        recorder.on_log(None, state, control, {"loss": 0.0, "grad_norm": 0.0})
    seconds = Seconds(step=9.0, rollout=2.0, rewards=1.0, weights=3.0, train=3.0)
    assert [row.seconds for row in ledger.rows] == [seconds] * 2


def test_logprobs_that_are_no_numbers_show_in_both_figures_whichever_pass_has_them():
    passes = [LogprobMismatch() for _ in range(3)]
    for found, value in zip(passes, (-1.0, math.nan, -3.0), strict=True):
        found.note(torch.tensor([[value, -2.0]]), torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2))
    whole = LogprobMismatch()
    for found in passes:
        whole.add(found)
    assert whole.tokens == 6 and math.isnan(whole.kl) and math.isnan(whole.greatest)
    assert (passes[0].greatest, passes[2].greatest) == (1.0, 1.0)
