"""The cluster files: the dashboard stays on loopback, every start has the token. Ray's launcher: test_launcher.py."""

from pathlib import Path

import pytest
import yaml

from tailrace.app.ray_settings import FRUGAL, unset

ROOT = Path(__file__).resolve().parents[2]
FILES = ["cluster.yaml", "cluster.local.yaml"]


@pytest.fixture(params=FILES)
def config(request):
    return yaml.safe_load((ROOT / request.param).read_text())


def start_commands(config):
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    return [command for command in commands if "ray start" in command]


def test_nothing_asks_for_every_interface(config):
    assert "0.0.0.0" not in str(config)
    heads = [command for command in start_commands(config) if "--head" in command]
    assert len(heads) == 1
    assert "--dashboard-host=127.0.0.1" in heads[0]


def test_every_start_asks_for_the_token(config):
    commands = start_commands(config)
    assert len(commands) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in commands)


def test_every_start_saves_processor_time(config):
    for command in start_commands(config):
        assert all(f" {name}={value} " in f" {command} " for name, value in FRUGAL.items()), command


def test_a_setting_of_ray_that_is_there_stays():
    name = next(iter(FRUGAL))
    assert unset(FRUGAL, {name: "9", "OTHER": "1"}) == {key: FRUGAL[key] for key in FRUGAL if key != name}
    assert unset(FRUGAL, {}) == FRUGAL


def test_nodes_install_the_package_and_need_no_pythonpath(config):
    assert "PYTHONPATH" not in str(config)
    assert any("make setup" in line or "--no-build-isolation ." in line for line in config["setup_commands"])


def test_gpu_nodes_install_the_hashed_lock_and_get_the_token():
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    assert any("--no-deps --require-hashes -r requirements/gpu.txt" in line for line in config["setup_commands"])
    assert "~/.ray/auth_token" in config["file_mounts"]


def test_every_package_installed_by_name_has_an_exact_version(config):
    lines = [
        line
        for key in ("setup_commands", "head_setup_commands", "worker_setup_commands")
        for line in config.get(key, [])
    ]
    named = [word for line in lines if "pip install" in line and "-r " not in line for word in line.split("-q ")[-1:]]
    assert all("==" in word for word in named), named
