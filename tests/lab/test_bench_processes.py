"""What `bench processes` makes of command lines and of two readings, and that the kernel's figures are read."""

import os
import subprocess
import sys

import pytest

from tailrace.app.cli import run
from tailrace.lab.benchmarks.live.processes import DRIVER, ENGINES, Used, name_of, parted, reading, shares

PYTHON = "/venv/bin/python3.11"
RAY = "/venv/lib/python3.11/site-packages/ray"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ray::ServeReplica:tailrace:Engine.generate_chunk", ENGINES),
        ("ray::ServeReplica:tailrace:Coordinator", "coordinator"),
        ("ray::ServeController.listen_for_change", "Serve controller"),
        ("ray::MasterActor.status", "pool: master actor"),
        ("ray::StoreActor", "pool: store actor"),
        ("ray::ShardActor.exchange", "context shard"),
        ("ray::IDLE", "idle worker"),
        ("ray::DashboardAgent", "dashboard agent"),
        ("ray-dashboard-JobHead-0 (python -c from multiprocessing.forkserver import main)", "dashboard module"),
        (f"{RAY}/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/raylet", "raylet"),
        (f"{RAY}/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray", "GCS"),
        (f"{PYTHON} -u {RAY}/_private/log_monitor.py --session-dir=/tmp/ray", "log monitor"),
        (f"{PYTHON} -u {RAY}/autoscaler/_private/monitor.py --logs-dir=/tmp/ray", "autoscaler monitor"),
        ("/venv/bin/mooncake_master --rpc_port=1", "mooncake_master"),
        ("/venv/bin/mooncake_client --port=1", "mooncake_client"),
        ("/usr/bin/something else", "something"),
    ],
)
def test_a_process_is_called_what_it_is(command, name):
    assert name_of([command] if command.startswith("ray") else command.split()) == name


def test_shares_are_seconds_over_seconds_added_by_name_and_only_of_processes_in_both_readings():
    before = {(1, 1): Used(ENGINES, 5.0), (2, 1): Used(ENGINES, 1.0), (3, 1): Used("GCS", 2.0), (4, 1): Used("x", 0.0)}
    after = {(1, 1): Used(ENGINES, 9.0), (2, 1): Used(ENGINES, 4.0), (3, 1): Used("GCS", 2.5), (4, 7): Used("x", 9.0)}
    assert shares(before, after, 10.0) == {ENGINES: 0.7, "GCS": 0.05}


def test_largest_shares_come_first():
    before = {(n, n): Used(name, 0.0) for n, name in enumerate("abc")}
    after = {(n, n): Used(name, n + 1.0) for n, name in enumerate("abc")}
    assert list(shares(before, after, 1.0)) == ["c", "b", "a"]


def test_engines_and_the_driver_are_apart_from_the_rest():
    found = parted({ENGINES: 1.8, "coordinator": 0.1, "GCS": 0.02, DRIVER: 0.01})
    assert found == {"engines": 1.8, "driver": 0.01, "rest": 0.12, "of_rest": {"coordinator": 0.1, "GCS": 0.02}}
    assert parted({}) == {"engines": 0.0, "driver": 0.0, "rest": 0.0, "of_rest": {}}


def test_this_process_and_its_children_are_read_and_processor_time_grows():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        before = reading()
        mine = next(key for key in before if key[0] == os.getpid())
        assert before[mine].name == DRIVER and child.pid in {pid for pid, _ in before}
        while reading()[mine].cpu_s == before[mine].cpu_s:
            pass  # as long as it takes to be seen working
        child.communicate(b"\n")
    after = reading()
    assert after[mine].cpu_s > before[mine].cpu_s and child.pid not in {pid for pid, _ in after}


@pytest.mark.parametrize("option", ["--seconds", "--idle"])
def test_too_short_a_window_is_refused(capsys, option):
    assert run(["bench", "processes", option, "1"]) == 2
    assert option in capsys.readouterr().err
