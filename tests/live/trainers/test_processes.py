"""A `trl.GRPOTrainer` of two processes (gloo): one rollout for both, and an error of the first one ends all."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("process_of_a_trainer.py")
TESTS = Path(__file__).parents[2]


def played(model: Path, out: Path, processes: int = 2, program: Path = PROGRAM) -> list[subprocess.CompletedProcess]:
    """Runs a trainer's processes to their end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    same |= {"LOCAL_WORLD_SIZE": str(processes), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    same["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    running = [
        subprocess.Popen(
            [sys.executable, str(program), str(model), str(out)],
            env=os.environ | same | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        return [
            subprocess.CompletedProcess(one.args, one.wait(), stdout=text)
            for one, text in [(one, one.communicate(timeout=300)[0]) for one in running]
        ]
    finally:
        for one in running:
            one.kill()


def test_processes_train_on_their_parts_of_one_rollout_and_end_with_an_error_of_the_first(small_model, tmp_path):
    ended = played(small_model, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["updates"] == [[1, "memory"]] and second["updates"] == []
    assert first["groups"] == [[4] * 4] and second["groups"] == [], "two groups of each process, in one batch"
    for one in (first, second):
        assert one["ratio"] == pytest.approx([1], abs=1e-3) and one["difference"] == pytest.approx([0], abs=1e-3)
    assert first["trained"] == second["trained"]
    assert [one.returncode for one in ended] == [1, 1], ended
    line = "these weights are refused"
    assert line in ended[0].stdout
    assert f"the trainer's first process has failed: ValueError: {line}" in ended[1].stdout
