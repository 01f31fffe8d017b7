"""The simulator's benchmark: its workload is what was asked for, its runs end, and it reports what readers compare."""

import json

import numpy as np
import pytest

from tailrace.app.cli import run
from tailrace.lab.benchmarks.control_plane.simulator import GROUP_SAMPLES, drive, measure, workload


def test_the_workload_has_as_many_samples_and_tokens_as_asked():
    work = workload(256, 500)
    (groups,) = work.steps
    lengths = np.array([group.lengths for group in groups])
    assert lengths.shape == (256 // GROUP_SAMPLES, GROUP_SAMPLES)
    assert lengths.mean() == pytest.approx(500, rel=0.02) and lengths.max() <= work.max_tokens == 1000
    assert work == workload(256, 500)


@pytest.mark.parametrize("drafting", ["off", "goodput"])
def test_a_drive_ends_and_drafts_make_it_shorter(drafting):
    found, plain = drive(64, 2, 200, drafting), drive(64, 2, 200, "off")
    assert found["wall_s"] > 0 and found["events"] > 64 and found["peak_mb"] > 0
    ratio = found["makespan_s"] / plain["makespan_s"]
    assert ratio == 1 if drafting == "off" else ratio < 1


def test_a_measurement_says_what_was_measured(monkeypatch):
    monkeypatch.setattr("tailrace.lab.benchmarks.control_plane.simulator.SMALL", 64)
    monkeypatch.setattr("tailrace.lab.benchmarks.control_plane.simulator._in_a_child", drive)
    result = measure(128, 4, 200)
    assert (result["samples"], result["replicas"], result["tokens"], result["drafting"]) == (128, 4, 200, "off")
    figures = {"wall_s", "peak_mb", "events", "events_per_s", "cost_ratio", "makespan_s"}
    assert set(result) == {"samples", "replicas", "tokens", "drafting"} | figures
    assert all(result[name] > 0 for name in figures - {"wall_s"})
    assert json.loads(json.dumps(result)) == result


def test_an_unknown_policy_is_refused_before_anything_runs(capsys):
    assert run(["bench", "simulator", "--drafting", "goodputt"]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and "goodputt" in error
