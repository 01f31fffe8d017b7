"""Replayed drafts: an engine's own code on modelled replicas does what it does on one; nobody knows the future."""

import json

import numpy as np
import pytest

from tailrace.app.cli import run
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.messages.context import GroupRef, PastAnswer
from tailrace.deployments.messages.rollout import PromptGroup
from tailrace.lab.benchmarks.drafting.budgets import EarlierDrafts, Replica
from tailrace.lab.benchmarks.drafting.budgets import workload as chunks_of
from tailrace.lab.benchmarks.drafting.drafts import RecordedRollouts
from tailrace.lab.benchmarks.live.calibrate import BATCH
from tailrace.lab.benchmarks.live.calibrate import workload as calibrated
from tailrace.lab.replay.recorded import END_TOKEN, Recorded, forced, of_trace
from tailrace.lab.replay.setup import TraceSetup
from tailrace.lab.replay.speculation import replaying
from tailrace.lab.replay.wire import Wire, WireEnd
from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.scenario import load_scenario
from tailrace.lab.simulator.systems import system
from tailrace.lab.simulator.types import Cluster, ReplicaModel, SimulatedRun, StepModel, Workload, WorkloadGroup
from tailrace.policies.families.registry import Policies, load_policy
from tailrace.policies.protocol.step_cost import StepCost

STEP = StepModel(0.035, 0.003, 0.0)
COST = StepCost((1.0, 600.0), (STEP.seconds(1, 0), STEP.seconds(600, 0)))
MAX_TOKENS = 400


def rollouts(groups: int = 2, samples: int = 8, seed: int = 5) -> list[RecordedRollouts]:
    """Answers of 40 to 200 tokens that mostly follow a text of their group's, and two of an earlier epoch."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        text = rng.integers(0, 5000, 200).astype(np.int32)
        answers = [
            np.where(rng.random(size) < 0.85, text[:size], rng.integers(0, 5000, size)).astype(np.int32)
            for size in rng.integers(40, 200, samples + 2)
        ]
        history = [PastAnswer("", 0, 0, None, answers.pop()) for _ in range(2)]
        made.append(RecordedRollouts(rng.integers(0, 5000, 20).astype(np.int32), answers[:1], answers, history))
    return made


def of(prompts: list[RecordedRollouts]) -> tuple[Workload, dict[str, Recorded]]:
    known = {f"g{n}": Recorded(prompt.prompt, prompt.mates, prompt.history) for n, prompt in enumerate(prompts)}
    groups = tuple(WorkloadGroup(name, len(one.prompt), tuple(map(len, one.answers))) for name, one in known.items())
    return Workload("w", MAX_TOKENS, (groups,)), known


def replay(
    prompts: list[RecordedRollouts],
    replicas: int,
    running: int,
    drafting: str = "goodput",
    chunk_tokens=None,
    **settings,
) -> SimulatedRun:
    work, known = of(prompts)
    chunking = {"type": "fixed", "chunk_tokens": chunk_tokens}
    policies = Policies(ordering="fcfs", placement="least_kv", chunking=chunking, drafting=drafting)
    cluster = Cluster(ReplicaModel(STEP, 1 << 20, running, 1e9, 1e9, 0.0), replicas)
    with replaying(work, known, policies.drafting, STEP, IndexSettings(**settings)) as speculation:
        return simulate(work, cluster, policies, speculation=speculation, check=True)


def acceptance_length(run: SimulatedRun) -> float:
    return sum(one.tokens for one in run.ended) / sum(one.verifications for one in run.ended)


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["goodput", "fixed"])
def test_one_replica_does_what_the_bench_of_budgets_measures(drafting):
    prompts = rollouts()
    chunks, history = chunks_of(prompts, load_policy("drafting", drafting))
    bench = Replica(IndexSettings(), chunks[0].draft.policy, COST, 16, EarlierDrafts(history)).run(chunks)
    run = replay(prompts, 1, 16, drafting)
    assert acceptance_length(run) == pytest.approx(bench.acceptance_length, rel=0.02)
    assert run.makespan_s == pytest.approx(bench.makespan_s, rel=0.02)
    assert sum(one.drafted for one in run.ended) == pytest.approx(bench.drafted, rel=0.02)
    assert sum(one.accepted for one in run.ended) == pytest.approx(bench.accepted, rel=0.02)


def test_a_replay_repeats_to_the_digit_and_makes_every_token_once():
    prompts = rollouts()
    runs = [replay(prompts, 2, 6, chunk_tokens=32) for _ in range(2)]
    assert runs[0] == runs[1]
    assert sorted(one.tokens for one in runs[0].ended) == sorted(len(a) for prompt in prompts for a in prompt.mates)
    assert max(one.chunks for one in runs[0].ended) > 3


@pytest.mark.slow
def test_mates_on_other_replicas_are_drafted_from():
    """Two replicas that share each group: without mates' tokens there are fewer right drafts, without history too."""
    prompts = rollouts()
    together = acceptance_length(replay(prompts, 2, 6))
    assert together > 1.05 * acceptance_length(replay(prompts, 2, 6, history=False))
    assert together > 1.5 * acceptance_length(replay(prompts, 2, 6, history=False, group_context=False))


def test_a_draft_never_knows_what_nobody_has_made():
    """Alone, and of a text without repetition, no draft is right: the truth is only compared with."""
    rng = np.random.default_rng(1)
    prompt = rng.permutation(4000)[:20].astype(np.int32)
    alone = [RecordedRollouts(prompt, [], [(5000 + rng.permutation(4000)[:200]).astype(np.int32)], [])]
    assert sum(one.accepted for one in replay(alone, 1, 4, "fixed").ended) == 0


def test_a_wire_tells_what_others_made_since_and_at_first_all():
    group = GroupRef("g", "g")
    tokens = np.arange(10, dtype=np.int32)
    wire = Wire({"g": Recorded(tokens, [tokens, 2 * tokens], [PastAnswer("", 0, 0, None, tokens)])})
    a, b = WireEnd(wire, 0), WireEnd(wire, 1)
    a.hold(group)
    a.append(group, 0, 0, [0, 1])
    a.append(group, 0, 2, [2])
    b.hold(group)
    b.append(group, 1, 0, [0, 2, 4])
    (first,) = b.take()
    pieces = [(piece.sample_index, piece.start, piece.tokens.tolist()) for piece in first.pieces]
    assert pieces == [(0, 0, [0, 1, 2]), (1, 0, [0, 2, 4])] and len(first.history) == 1
    a.append(group, 0, 3, [3])
    b.append(group, 1, 3, [6])
    (second,) = b.take()
    assert [(p.sample_index, p.start, p.tokens.tolist()) for p in second.pieces] == [(0, 3, [3])]
    assert not second.history and not b.take()
    b.rest(group)
    a.append(group, 0, 4, [4])
    assert not b.take()
    b.hold(group)
    assert [piece.start for piece in b.take()[0].pieces] == [4]


def test_other_answers_than_the_workloads_are_refused():
    work, known = of(rollouts(1))
    known["g0"] = known["g0"]._replace(answers=known["g0"].answers[1:])
    with pytest.raises(ValueError, match="g0"), replaying(work, known, load_policy("drafting", "fixed"), STEP):
        pass


def test_groups_that_replay_are_recorded_as_calibration_simulates_them():
    text = tuple(np.random.default_rng(0).permutation(99).tolist())
    ids = text[:40], text[:80], text[:60], text[:70]
    groups = [
        PromptGroup(prompt_id=name, token_ids=(1, 2, 3), samples=4, max_tokens=90, forced_token_ids=ids)
        for name in "ab"
    ]
    work, found = calibrated(groups), {}
    for drafting in ("off", "goodput"):
        policies = Policies(chunking={"type": "fixed", "chunk_tokens": 16}, drafting=drafting)
        with replaying(work, forced(groups, BATCH), policies.drafting, STEP) as speculation:
            cluster = Cluster(ReplicaModel(STEP, 1 << 20, 3, 1e9, 1e9, 0.0), 2)
            found[drafting] = simulate(work, cluster, policies, speculation=speculation, check=True)
    assert acceptance_length(found["off"]) == 1.0 < acceptance_length(found["goodput"])
    assert found["goodput"].makespan_s < found["off"].makespan_s


@pytest.mark.parametrize("way", ["table", "replay"])
def test_a_trace_runs_on_a_papers_cluster_by_table_and_by_replay(way):
    scenario = load_scenario("das-7b-16k").scaled(0.2)
    _, known = of(rollouts())
    setup = TraceSetup.of(scenario, "w", known, way == "replay")
    groups = setup.setup.workload.steps[0]
    assert [group.lengths for group in groups] == [tuple(map(len, one.answers)) for one in known.values()]
    assert all(len(group.past_lengths) == 1 and len(group.past_lengths[0]) == 2 for group in groups)
    for name in ("verl", "tailrace"):
        ran = setup.run(name, system(name), 0, check=True)
        assert 0 < ran.bounds["best_s"] < ran.makespan_s
        assert any(one.drafted for one in ran.ended) == (name == "tailrace")


LINE = {"prompt_id": 7, "prompt": "ab", "epochs": [
    {"policy_step": 1, "samples": [{"text": "old", "reward": 1.0}]},
    {"policy_step": 2, "samples": [{"text": "newer"}, {"text": "n"}, {"text": "left out"}]},
]}  # fmt: skip


def test_a_trace_is_its_last_checkpoint_and_the_others_are_history():
    (found,) = of_trace([LINE], lambda text: [ord(c) for c in text], samples=2, max_tokens=4).values()
    assert [answer.tolist() for answer in found.answers] == [[110, 101, 119, 101], [110, END_TOKEN]]
    assert [(past.epoch, past.reward, len(past.tokens)) for past in found.history] == [(0, 1.0, 4)] and found.epoch == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--acceptance", "replay"), "--acceptance"),
        (("--cluster", "moonlight"), "--cluster"),
        (("--workload", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--workload", "TRACE", "--cluster", "moonligt"), "moonlight"),
        (("--workload", "TRACE", "--steps", "2"), "--steps"),
        (("--workload", "TRACE", "--compare", "verl,specactor"), "specactor"),
    ],
)
def test_what_a_trace_cannot_do_is_said_in_one_line(capsys, tmp_path, arguments, said):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(LINE) + "\n")
    assert run(["simulate", *(str(trace) if part == "TRACE" else part for part in arguments)]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and said in error
