"""Where the seconds of a simulated step went: the parts add up, and each is of its cause."""

import json
from dataclasses import replace

import pytest
import yaml

from tailrace.app.cli import run
from tailrace.lab.simulator.report import PARTS
from tailrace.lab.simulator.report import account as account_of
from tailrace.lab.simulator.scenario import FOLDER
from tailrace.lab.simulator.systems import Setup, system
from tailrace.lab.simulator.types import Cluster, Gap, ReplicaModel, Span, StepModel, Workload, WorkloadGroup

STEP = StepModel(1.0, 0.2, 0.001)
CLUSTER = Cluster(ReplicaModel(STEP, 10_000, 8, 100.0, 1_000.0, 0.1), 1)


def parts(
    lengths: tuple[int, ...], name: str = "verl", running: int = 8, capacity: int = 10_000, steps: int = 1,
    group_id: str = "g", gaps: tuple[tuple[Gap, ...], ...] = (),
):  # fmt: skip
    """The account of a group on one replica, and its makespan."""
    group = WorkloadGroup(group_id, 10, lengths, gaps=gaps)
    cluster = Cluster(ReplicaModel(STEP, capacity, running, 100.0, 1_000.0, 0.1), 1)
    workload = Workload("made-up", max(lengths), ((group,),) * steps)
    found = Setup(workload, cluster, 16, None).run(name, system(name), 0, spans=True)
    assert sum(found.account.values()) == pytest.approx(found.makespan_s)
    return found.account, found.makespan_s


def test_a_sample_alone_neither_waits_nor_shares():
    account, makespan_s = parts((50,))
    assert account["waited_s"] == pytest.approx(0.0, abs=1e-6) and account["loaded_s"] == pytest.approx(0.1)
    assert account["crowd_s"] == pytest.approx(0.0, abs=0.1) and account["drafts_s"] == pytest.approx(0.0, abs=0.1)
    assert account["alone_s"] == pytest.approx(makespan_s - 0.1, rel=0.01)


def test_mates_that_run_beside_it_are_a_crowd():
    alone, _ = parts((50,))
    account, _ = parts((50, 50, 50, 50))
    token_s = STEP.token_s + STEP.context_s * (10 + 50 / 2)
    assert account["crowd_s"] == pytest.approx(50 * 3 * token_s, rel=0.01)
    assert account["alone_s"] == pytest.approx(alone["alone_s"])


def test_mates_that_run_before_it_make_it_wait():
    account, _ = parts((50, 50, 50, 50), running=1)
    one, _ = parts((50,))
    assert account["waited_s"] == pytest.approx(3 * one["alone_s"], rel=0.05)
    assert account["crowd_s"] == pytest.approx(0.0, abs=0.1)


def test_the_last_samples_of_all_steps_count():
    one, _ = parts((50, 20))
    both, _ = parts((50, 20), steps=2)
    assert both == pytest.approx({part: 2 * seconds for part, seconds in one.items()}), "each has spans of its own step"


def test_ids_of_prompts_have_any_characters():
    assert parts((50, 20), group_id="ada@x#1") == parts((50, 20))


def test_turns_that_are_requests_of_their_own_count_as_one_sample():
    gaps = ((Gap(20, 1.0, 5), Gap(35, 1.0, 5)),)
    account, _ = parts((50,), "tailrace_requests", gaps=gaps)
    assert account["alone_s"] + account["crowd_s"] > 50 * STEP.base_s, "each of its 50 steps was found"


def test_kv_that_a_copy_loads_beside_it_is_no_time_of_the_sample():
    group = WorkloadGroup("g", 10, (20,))
    of_sample = [(0, "prefill", 1.0, 2.0, 10, 0), (0, "generate", 2.0, 50.0, 20, 20)]
    of_copy = [(1, "fetch", 10.0, 12.0, 15, 0), (1, "prefill", 12.0, 13.0, 5, 0), (1, "race", 13.0, 50.0, 10, 10)]
    spans = [Span(replica, "g#0", *rest) for replica, *rest in of_sample + of_copy]
    workload = Workload("w", 20, ((group,),))
    run = Setup(workload, CLUSTER, 16, None).run("verl", system("verl"), 0)
    raced = replace(run, ended=(run.ended[0]._replace(ended_s=50.0),), spans=tuple(spans))
    account = account_of(raced, workload, CLUSTER, None, 0)
    assert (account["waited_s"], account["loaded_s"]) == (1.0, 1.0)


def test_the_command_shows_it_and_leaves_it_out_unless_asked(capsys, tmp_path):
    """A quarter of a replica's samples, on one."""
    data = yaml.safe_load((FOLDER / "das-7b-16k.yaml").read_text())
    data["prompts"]["value"] //= 4
    workload = tmp_path / "few.yaml"
    workload.write_text(yaml.safe_dump(data))
    words = ["simulate", "--workload", str(workload), "--scale", "0.01", "--compare"]
    assert run([*words, "routed", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])["mean"]["routed"]
    assert all(plain[f"last_{part}"] is None for part in PARTS)
    assert run([*words, "routed,tailrace", "--json", "--account"]) == 0
    mean = json.loads(capsys.readouterr().out.splitlines()[-1])["mean"]
    for name, figures in mean.items():
        assert sum(figures[f"last_{part}"] for part in PARTS) == pytest.approx(figures["makespan_s"], rel=1e-4), name
    assert mean["routed"]["last_drafts_s"] == pytest.approx(0.0, abs=1.0), "no drafts, and none are best"
    assert mean["tailrace"]["last_drafts_s"] > 0
    assert run([*words, "routed", "--account"]) == 0
    assert "sample that ended last" in capsys.readouterr().out
