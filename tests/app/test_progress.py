"""The progress of a rollout counts all of its samples, also after a lost coordinator."""

from types import SimpleNamespace

import pytest

from tailrace.app import progress
from tailrace.app.progress import RolloutProgress
from tailrace.deployments.messages.status import BatchStatus


def status_of(*batches: tuple[int, int, int]) -> SimpleNamespace:
    """A status with the submissions of a batch: samples, ended ones and tokens of each."""
    found = [
        BatchStatus(
            batch_id="b", samples=samples, ended=ended, groups=1, emitted=0, tokens=tokens, tail=False, seconds=1.0
        )
        for samples, ended, tokens in batches
    ]
    return SimpleNamespace(batches=found, waits_for=None, running=2, waiting=0)


@pytest.fixture
def shown(monkeypatch, capsys):
    """Shows statuses ten seconds apart. Returns the lines."""
    now = iter(range(0, 1_000, 10))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))

    def show(*statuses) -> list[str]:
        follower = RolloutProgress(None, "b", 8)
        for status in statuses:
            follower._show(status)
        return capsys.readouterr().err.splitlines()

    return show


def test_groups_that_came_before_a_loss_stay_counted_and_no_rate_is_negative(shown):
    lines = shown(status_of((8, 6, 900)), status_of(), status_of((2, 0, 100)), status_of((2, 2, 400)))
    assert [line.partition(" ")[0] for line in lines] == ["6/8", "6/8", "8/8"]
    assert lines[1].startswith("6/8 samples, 22 tokens/s")


def test_all_submissions_of_a_batch_count(shown):
    (line,) = shown(status_of((6, 3, 200), (2, 1, 100)))
    assert line == "4/8 samples, 15 tokens/s, 2 running, 0 waiting"
