"""The driver of the certificate of learning: one that ends by itself was not killed, and one that fails is told."""

import os
import time
from pathlib import Path

import pytest

from tailrace.app.errors import Failed
from tailrace.app.train.record.ledger import LedgerRow
from tailrace.lab.training_certificate import driver
from tailrace.lab.training_certificate.comparison import first_difference
from tailrace.lab.training_certificate.runs import training


def fails(*_) -> None:
    os._exit(3)


def ends(*_) -> None:
    """The training is over before it is to be killed."""


def hangs(*_) -> None:
    time.sleep(600)


def driven(monkeypatch, tmp_path: Path, train, kill_after: int | None) -> driver.TrainingDriver:
    monkeypatch.setattr(driver, "_train", train)
    found = driver.TrainingDriver(training("demo", 4, 3, 4, 8), tmp_path, "127.0.0.1:1")
    found.run(kill_after)
    return found


@pytest.mark.parametrize("kill_after", [None, 3])
def test_a_driver_that_fails_by_itself_is_told(monkeypatch, tmp_path, kill_after):
    with pytest.raises(Failed, match="exit code 3"):
        driven(monkeypatch, tmp_path, fails, kill_after)


def test_a_driver_that_ended_was_not_killed(monkeypatch, tmp_path):
    assert not driven(monkeypatch, tmp_path, ends, 3).was_killed
    assert driven(monkeypatch, tmp_path, hangs, 0).was_killed


def row(loss: float, grad_norm: float) -> LedgerRow:
    values = {"reward_mean": 0.5, "reward_std": 0.1, "loss": loss, "grad_norm": grad_norm, "weights_checksum": "a"}
    return LedgerRow.model_construct(step=1, **values)


def test_a_loss_that_is_no_number_in_both_runs_is_no_difference():
    nan = float("nan")
    assert first_difference([row(nan, 1.0)], [row(float("nan"), 1.0)]) is None
    assert first_difference([row(nan, 1.0)], [row(2.0, 1.0)])["field"] == "loss"
    assert first_difference([row(2.0, 1.0)], [row(2.0, nan)])["field"] == "grad_norm"
