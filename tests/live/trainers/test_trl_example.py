"""The example script of TRL, as written, on a real service."""

import runpy
import sys
from pathlib import Path

import pytest
import yaml

from tailrace.app.cluster import service
from tailrace.app.config import DEFAULT_CONFIG, ServeFile

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "trl_grpo.py"


def test_the_example_script_trains_on_a_real_service(tiny_model, tmp_path, monkeypatch):
    file = yaml.safe_load(DEFAULT_CONFIG.read_text())
    file["applications"][0]["args"]["engine"] |= {"model": str(tiny_model), "kv_cache_gib": 0.5, "max_model_len": 1024}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tiny_model)])
    with service(ServeFile.model_validate(file), None) as client:
        names = runpy.run_path(str(SCRIPT), run_name="__main__")
        assert client.status_blocking().weights_version == 2
    history = [row for row in names["trainer"].state.log_history if "loss" in row]
    assert len(history) == 2
    for row in history:  # engine and trainer compute the same law, to the noise of floating point
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert row["sampling/sampling_logp_difference/max"] == pytest.approx(0, abs=1e-3)
