"""What calibration makes of its measurements: nothing of the machine is in these, only arithmetic and the model."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from performances import measured

from tailrace.app.errors import BadInput
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, SampleResult, Timings
from tailrace.lab.benchmarks.commands.bench import command
from tailrace.lab.benchmarks.live.calibrate import figures, runs, simulated, slowness, verdict, workload
from tailrace.lab.benchmarks.live.probes import (
    HANDOVER_CHUNK_TOKENS,
    HANDOVERS,
    LADDER,
    PROMPT_TOKENS,
    bound,
    crowd,
    joining,
    model_of,
    pooled,
    probe,
    shortened,
    step_ms,
)
from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.types import Cluster, StepModel, Workload, WorkloadGroup
from tailrace.policies.protocol.events import ReplicaJoined

JOINED = [ReplicaJoined(0.0, name, 32, 1000, 8, 0, 0, "n") for name in "ab"]
MEASURED = [measured(1.0, "a", 500.0, 20_000.0, 0.01, 0.03, 0.002), measured(1.0, "b", 500.0, 40_000.0, 0.03, 0.03)]


def ladder(base_ms: float) -> dict:
    """Of a machine whose steps are a line through tokens and context read."""
    steps = [
        {"chunks": n, "draft_tokens": 0, "context_tokens": c, "step_ms": base_ms + 3 * n + 0.001 * n * c}
        for n, c in LADDER
    ]
    return {"steps": steps, "prefill": [{"tokens": c, "prefill_ms": 10 + 2.0 * c} for n, c in LADDER if n == 1]}


PROFILE = pooled([ladder(30)])


def test_ladders_make_a_profile_between_them():
    fit = pooled([ladder(30), ladder(34)])["fit"]
    assert fit["base_ms"] == pytest.approx(32, rel=0.02)
    assert fit["per_token_ms"] == pytest.approx(3, rel=0.05) and fit["per_context_token_us"] == pytest.approx(
        1, rel=0.1
    )


def test_the_model_is_what_the_engines_say_and_the_profile():
    model = model_of(PROFILE, JOINED, MEASURED, 0.0)
    assert (model.kv_capacity_tokens, model.max_running, model.block_tokens) == (32_000, 8, 32)
    assert model.fetch_tokens_s == pytest.approx(30_000) and model.fetch_base_s == pytest.approx(0.02)
    assert model.step.base_s == pytest.approx(0.03, rel=1e-2) and model.prefill_tokens_s == pytest.approx(500, rel=1e-2)
    assert model.handover_s == 0.0, "chunks cost nothing here: what the model has of them already is not given back"
    assert model_of(PROFILE, JOINED, [], 0.0).fetch_tokens_s == 0.0


@pytest.mark.parametrize("handover_s", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("measured", [MEASURED, []], ids=["pool", "no pool"])
def test_a_hand_over_is_what_chunks_take_beyond_the_rest_of_the_model(handover_s, measured):
    """Probed on a machine that is the model itself, it comes out as it was put in."""
    joined = [replace(one, block_tokens=1) for one in JOINED]  # else there is prefill, too
    model = replace(model_of(PROFILE, joined, measured, 0.0), handover_s=handover_s)
    tokens = (HANDOVERS + 1) * HANDOVER_CHUNK_TOKENS
    work = Workload("w", tokens, ((WorkloadGroup("g", PROMPT_TOKENS, (tokens,)),),))
    whole, chunks = (
        simulate(work, Cluster(model, 1), bound(tokens), check=True).makespan_s
        for tokens in (None, HANDOVER_CHUNK_TOKENS)
    )
    found = model_of(PROFILE, joined, measured, (chunks - whole) / HANDOVERS)
    assert found.handover_s == pytest.approx(handover_s, abs=1e-3), "the first save takes the prompt's KV, too"


@pytest.mark.parametrize("join_s", [0.0, 0.03, 0.2])
def test_what_joining_takes_of_a_busy_replica_comes_out_as_it_was_put_in(join_s):
    known = model_of(PROFILE, JOINED, MEASURED, 0.05)
    groups = crowd("crowd", 2).groups
    assert len({group.token_ids for group in groups}) == len({group.prompt_id for group in groups}) == len(groups)
    most = groups[0].max_tokens
    work = Workload("w", most, (tuple(WorkloadGroup(g.prompt_id, len(g.token_ids), (most,)) for g in groups),))
    cluster = Cluster(replace(known, join_s=join_s), 2, 2)
    whole_s, chunked_s = (
        simulate(work, cluster, bound(tokens), check=True).makespan_s for tokens in (None, HANDOVER_CHUNK_TOKENS)
    )
    assert joining(known, 2, chunked_s - whole_s).join_s == pytest.approx(join_s, rel=0.15, abs=2e-3)


@pytest.mark.slow
def test_a_run_is_simulated_as_slow_as_the_machine_was_around_it():
    times = slowness({"steps": [step | {"step_ms": 1.5 * step["step_ms"]} for step in ladder(30)["steps"]]}, PROFILE)
    assert times == pytest.approx(1.5, rel=1e-3)
    policies = runs(16)
    models = dict.fromkeys(policies, model_of(PROFILE, JOINED, MEASURED, 0.3))
    answers = tuple(tuple(range(5, 5 + length)) for length in (89, 39, 6))
    groups = [PromptGroup(prompt_id="g", token_ids=(1,) * 10, samples=3, max_tokens=99, forced_token_ids=answers)]
    once = simulated(groups, models, 2, policies, [1.0])
    slow = simulated(groups, models, 2, policies, [times, 9.0, 0.1])
    assert set(policies) == {"group_static", "seer", "seer_goodput"}
    for name in policies:
        assert slow[name]["makespan_s"] == pytest.approx(1.5 * once[name]["makespan_s"], rel=2e-3)


def test_kv_is_found_again_in_whole_blocks():
    """32-token blocks, 10 of prompt and chunks of 40: 18, 26 and 2 tokens are computed again."""
    model = model_of(PROFILE, JOINED, [], 0.0)
    work = Workload("w", 160, ((WorkloadGroup("g", 10, (160,)),),))
    (ended,) = simulate(work, Cluster(model, 1), bound(40), check=True).ended
    assert ended.chunks == 4 and ended.recomputed_tokens == 50 % 32 + 90 % 32 + 130 % 32
    (ended,) = simulate(work, Cluster(replace(model, block_tokens=1), 1), bound(40), check=True).ended
    assert ended.recomputed_tokens == 0


def test_a_replica_is_faster_while_its_node_has_no_other_that_works():
    """Steps of a second, half of it alone: 100 together, then 200; one that joins in the middle ends it for a while."""
    step = StepModel(1.0, 0.0, 0.0)
    model = replace(model_of(PROFILE, JOINED, [], 0.0), step=step, prefill_tokens_s=1e9, alone_share=0.5)

    def ends(per_node: int, *lengths: int, chunk: int | None = None):
        groups = tuple(WorkloadGroup(f"g{i}", 1, (tokens,)) for i, tokens in enumerate(lengths))
        run = simulate(Workload("w", 999, (groups,)), Cluster(model, 2, per_node), bound(chunk), check=True)
        return [round(one.ended_s, 3) for one in sorted(run.ended, key=lambda one: one.sample_id)]

    assert ends(2, 100, 300) == [100.0, 200.0]
    assert ends(1, 100, 300) == [50.0, 150.0]
    assert ends(2, 300, 300) == [300.0, 300.0]
    assert ends(2, 100, 300, chunk=10) == [100.0, 200.0]


def test_the_simulated_workload_is_the_live_one():
    groups = (
        PromptGroup(prompt_id="a", token_ids=(1, 2, 3), samples=2, max_tokens=9, forced_token_ids=((4,) * 8, (5,))),
        PromptGroup(prompt_id="b", token_ids=(1,), samples=1, max_tokens=9, forced_token_ids=((),)),
    )
    work = workload(groups)
    assert work.max_tokens == 9
    assert work.steps == ((WorkloadGroup("calibrate/a", 3, (9, 2)), WorkloadGroup("calibrate/b", 1, (1,))),)
    model = model_of(PROFILE, JOINED, MEASURED, 0.0)
    for policies in runs(4).values():
        run = simulate(work, Cluster(model, 2, 2), policies, check=True)
        assert figures(run)["makespan_s"] == round(run.makespan_s, 3)


def test_errors_are_signed_and_rankings_compared():
    live = {"a": {"makespan_s": 10.0, "tail_s": 4.0}, "b": {"makespan_s": 8.0, "tail_s": 0.0}}
    near = {"a": {"makespan_s": 11.0, "tail_s": 3.0}, "b": {"makespan_s": 8.0, "tail_s": 0.0}}
    found = verdict(live, near)
    assert found["error"] == {"a": {"makespan": 0.1, "tail": -0.25}, "b": {"makespan": 0.0, "tail": None}}
    assert found["same_ranking"] and found["ranking"]["live"] == ["b", "a"]
    near["a"]["makespan_s"] = 7.0
    assert not verdict(live, near)["same_ranking"]


def test_probes_share_no_kv_and_end_where_they_should():
    batch = probe("x", 3, 2, 40, 11)
    prompts = [group.token_ids for group in batch.groups]
    assert len(batch.groups) == 6 and all(a[0] != b[0] for a, b in pairwise(sorted(prompts)))
    for group in batch.groups:
        assert len(group.token_ids) == 40 and {len(ids) for ids in group.forced_token_ids} == {10}
        assert group.samples == 1 and group.max_tokens == 11


def test_a_shortened_probe_has_the_same_prompts_and_leaves_the_first_answers_whole():
    batch = probe("x", 2, 2, 40, 11)
    short = shortened(batch, "y", first=2)
    assert short.batch_id == "y" and [group.token_ids for group in short.groups] == [g.token_ids for g in batch.groups]
    assert [(group.max_tokens, len(group.forced_token_ids[0])) for group in short.groups] == [(11, 10)] * 2 + [
        (2, 1)
    ] * 2


def test_the_groups_of_a_probe_are_bound_to_the_replicas_that_they_are_of():
    order, groups = bound(None).ordering, probe("x", 2, 3, 40, 11).groups
    homes = [order.bind(number, len(groups), ("0", "1")) for number in range(len(groups))]
    assert [f"p{home}" for home in homes] == [group.prompt_id.partition("-")[0] for group in groups]


def test_a_step_is_the_median_chunks_and_the_mean_replicas():
    def group(name: str, took_s: float) -> GroupResult:
        sample = SampleResult(
            sample_index=0, token_ids=(1,) * 11, text="", logprobs=(), raw_logprobs=(), finish_reason="stop",
            timings=Timings(decode_s=took_s),
        )  # fmt: skip
        return GroupResult(batch_id="b", prompt_id=name, prompt_token_ids=(1,), samples=(sample,))

    assert step_ms([group("p0-0", 0.1), group("p0-1", 0.2), group("p0-2", 9.0), group("p1-0", 0.4)]) == pytest.approx(
        30
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"fit": {"base_ms": 1}}', '{"fit": {}, "prefill_ms": {}}'])
def test_a_file_that_is_no_profile_is_refused_before_anything_starts(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="not a file of `tailrace profile --out`"):
        command.main(["calibrate", "--trace", "none", "--profile", str(path)], standalone_mode=False)


def test_a_profile_of_the_command_is_taken(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    with pytest.raises(BadInput, match="none"):  # it is the trace that is not there
        command.main(["calibrate", "--trace", str(tmp_path / "none"), "--profile", str(path)], standalone_mode=False)
