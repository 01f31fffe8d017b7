"""Simulated training: laws over steps in flight, weights versions of tokens, and modes against each other."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from tailrace.app.cli import main, run
from tailrace.lab.simulated_training.busy_times import covered_s
from tailrace.lab.simulated_training.figures import StepCosts, TrainingFigures
from tailrace.lab.simulated_training.host import TrainingHost
from tailrace.lab.simulated_training.learner import Learner, fixed_order, trained_tokens
from tailrace.lab.simulated_training.modes import MODES, mode
from tailrace.lab.simulated_training.report import training_summary
from tailrace.lab.simulated_training.run import figures_of, gpus_of, host_of, train_run
from tailrace.lab.simulated_training.steps import training_workload
from tailrace.lab.simulator.scenario import Known, load_scenario
from tailrace.lab.simulator.systems import Setup, system
from tailrace.lab.simulator.types import Workload

STEPS = 3
FIGURES = TrainingFigures()


@cache
def small():
    """Four GPUs, few and short answers: each mode takes half a second or less."""
    scenario = load_scenario("das-7b-16k").scaled(0.5)
    quantiles = Known(value={0.28: 51.0, 0.87: 90.0}, assumed="a hundred-and-twenty-eighth, to be quick")
    changes = {"prompts": 6, "samples": 3, "max_tokens": 128, "chunk_tokens": 16}
    update = {key: getattr(scenario, key).scaled(value, 0.1) for key, value in changes.items()}
    update["lengths"] = scenario.lengths.model_copy(update={"quantiles": quantiles})
    return scenario.model_copy(update=update)


@cache
def ran(name: str, kv: str = "fresh", staleness: int = 2, steps: int = STEPS) -> TrainingHost:
    host = host_of(small(), mode(name, staleness), 0, steps, FIGURES, check=True, kv_on_update=kv)
    host.run()
    return host


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_every_sample_of_every_step_ends_once_with_its_own_length_and_is_trained_on(name):
    host = ran(name)
    work = training_workload(small(), 0, STEPS, FIGURES.epoch_steps.value, MODES[name].by_length)
    truth = {
        (step, f"{group.group_id}#{i}"): tokens
        for step, groups in enumerate(work.steps)
        for group in groups
        for i, tokens in enumerate(group.lengths)
    }
    assert Counter((one.step, one.sample_id) for one in host._ended) == Counter(truth.keys())
    made = {key: sum(tokens for _, tokens in pieces) for key, pieces in host.versions_of.items()}
    assert made == truth
    assert len(host.published_s) == STEPS and host.published_s == sorted(host.published_s)
    assert all(done > rolled for done, rolled in zip(host.published_s, host.rolled_s, strict=True))


def test_by_length_an_epoch_has_the_same_prompts_in_steps_of_like_length():
    plain, ordered = (training_workload(small(), 0, 8, 4, by_length) for by_length in (False, True))
    for first in (0, 4):
        both = [{group.group_id: group for step in work.steps[first : first + 4] for group in step}
                for work in (plain, ordered)]  # fmt: skip
        assert both[0] == both[1] and len(both[1]) == 4 * small().prompts.value
    longest = [[max(group.past_lengths[0]) for group in step] for step in ordered.steps]
    runs = sorted((min(step), max(step)) for step in longest[:4])
    assert all(before[1] <= after[0] for before, after in pairwise(runs)), "the runs of a sorted epoch"
    assert longest[:4] != sorted(longest[:4])


@pytest.mark.slow
def test_rollouts_by_length_take_less_time_where_history_tells_lengths():
    """An epoch of four steps on a sixteenth of RhymeRL's cluster, samples whole, with our drafts."""
    scenario = load_scenario("rhyme-14b-16k").scaled(1 / 16)
    total_s = [0.0, 0.0]
    for by_length in (False, True):
        for step in training_workload(scenario, 0, 4, 4, by_length).steps:
            setup = replace(Setup.of(scenario, 0), workload=Workload("w", scenario.max_tokens.value, (step,)))
            total_s[by_length] += setup.run("routed_drafts", system("routed_drafts"), 0).makespan_s
    assert total_s[0] > 1.08 * total_s[1], total_s


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_a_token_is_of_weights_within_the_bound_and_never_of_later_ones_than_its_step_s(name):
    host, bound = ran(name), MODES[name].ahead + MODES[name].puts_off
    for (came, sample_id), pieces in host.versions_of.items():
        step = host.trained_in(came, sample_id)
        versions = [version for version, _ in pieces]
        assert versions == sorted(versions), sample_id
        assert all(step - bound <= version <= step for version in versions)
    if not (MODES[name].in_flight or MODES[name].puts_off):
        assert all(len({version for version, _ in pieces}) == 1 for pieces in host.versions_of.values())


@pytest.mark.parametrize("kv", ["fresh", "keep"])
def test_bounded_samples_continue_through_updates_and_keep_or_compute_their_kv(kv):
    host = ran("bounded", kv=kv)
    assert any(len({version for version, _ in pieces}) > 1 for pieces in host.versions_of.values())
    assert {step - version for step, version in host.made} <= {0, 1, 2}


@pytest.mark.slow
def test_in_bounded_groups_a_step_has_groups_of_several_and_samples_are_less_stale():
    batches, groups = ran("bounded", steps=5), ran("bounded_groups", steps=5)
    assert groups.other_step_share() > 0 == batches.other_step_share()
    stale = [figures_of(host, small(), MODES["bounded"], FIGURES)["staleness_mean"] for host in (batches, groups)]
    assert stale[1] < stale[0], "what would wait in a queue is begun later"
    sizes = Counter(groups._learner.trained_in.values())
    assert set(sizes.values()) == {small().prompts.value}


def test_outliers_move_and_the_groups_of_those_that_leave_their_step_are_trained_on_in_the_next():
    scenario = load_scenario("rhyme-14b-16k").whole().scaled(0.25)
    changes = {"prompts": 16, "samples": 4}
    few = scenario.model_copy(update={key: getattr(scenario, key).scaled(n, 0.1) for key, n in changes.items()})
    host = host_of(few, mode("histopipe_migrating"), 0, 6, FIGURES, check=True)
    host.run()
    found = figures_of(host, few, mode("histopipe_migrating"), FIGURES)
    assert 0 < found["migrated_share"] < 0.2 and found["staleness_max"] <= 2
    assert found["other_step_share"] > 0
    assert all(step - came == 1 for (came, _), step in host._learner.trained_in.items())


def test_fresh_kv_computes_contexts_again_and_kept_kv_computes_fewer():
    computed = {kv: sum(one.recomputed_tokens for one in ran("bounded", kv=kv)._ended) for kv in ("fresh", "keep")}
    assert computed["fresh"] > 2 * computed["keep"]


@pytest.mark.parametrize("staleness", [1, 3])
def test_the_bound_of_bounded_is_the_one_asked_for(staleness):
    made = ran("bounded", staleness=staleness).made
    assert max(step - version for step, version in made) <= staleness


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_overlap_is_not_slower_than_training_after_the_rollout_on_the_same_draw_and_gpus(seed):
    """Of one on-policy mode, with and without streams; all else equal."""
    late = host_of(small(), mode("overlap").__class__(**{**_fields("overlap"), "streams": False}), seed, 3, FIGURES)
    late.run()
    early = host_of(small(), mode("overlap"), seed, 3, FIGURES)
    early.run()
    assert early.published_s[-1] <= late.published_s[-1] * (1 + 1e-9)
    assert early.versions_of == late.versions_of, "on-policy both"


def _fields(name: str) -> dict:
    return {key: getattr(MODES[name], key) for key in MODES[name].__slots__}


@pytest.mark.parametrize("name", ["bounded", "histopipe"])
def test_the_same_seed_gives_the_same_bytes_and_another_one_other_figures(name):
    first, second, other = (json.dumps(train_run(small(), mode(name), seed, 2)) for seed in (5, 5, 6))
    assert first == second != other


def test_in_one_step_off_a_step_is_rolled_out_while_the_one_before_is_trained_on():
    host = ran("one_step_off")
    assert {step - version for step, version in host.made} == {0, 1}
    assert all(step - version == 1 for step, version in host.made if step)
    for step in range(1, STEPS - 1):
        begun = min(one.submitted_s for one in host._ended if one.step == step + 1)
        assert begun >= max(host.published_s[step - 1], host.rolled_s[step])


def test_replicas_of_histopipe_update_by_themselves():
    """Some begin the next step while others are still at work on the last one."""
    host, steps = ran("histopipe", steps=5), 5
    loads = [begin_s for of_replica in host.busy.loading for begin_s, _ in of_replica]
    assert len(set(loads)) > steps - 1
    step_ends = host.rolled_s
    assert any(begin_s < step_ends[step] for step in range(1, steps - 1) for begin_s in loads)


@pytest.mark.parametrize("name", MODES)
def test_shares_are_shares_and_every_mode_has_all_gpus(name):
    host = ran(name)
    found = figures_of(host, small(), MODES[name], FIGURES)
    for key, value in found.items():
        assert not key.endswith("share") or -1e-9 <= value <= 1 + 1e-9, key
    rollout, train = gpus_of(small(), MODES[name], FIGURES)
    assert (rollout + train if MODES[name].apart else train) == small().gpus.value


def test_training_takes_operations_over_gpus():
    scenario = small()
    costs, twice = (
        StepCosts.of(scenario, FIGURES.model_copy(update={"gradient_ops": Known(value=ops, assumed="x")}), 4, True)
        for ops in (6, 14)
    )
    assert twice.token_gpu_s == pytest.approx(2 * costs.token_gpu_s)
    for name, share in (("verl", 1.0), ("sync", 0.75)):  # without the pass for old logprobs: 6 of 8 operations
        host = ran(name)
        spent = sum(end - begin for begin, end in host.busy.training)
        tokens = sum(trained_tokens(group) for groups in host._workload.steps for group in groups)
        assert spent == pytest.approx(share * tokens * costs.token_gpu_s / scenario.gpus.value), name


def test_pieces_follow_the_fixed_order_without_a_gap():
    (groups,) = training_workload(small(), 0, 1, 1).steps
    learner, order = Learner([groups], 0.0, 1.0, late=False), fixed_order(groups)
    past = [sum(group.past_lengths[0]) for group in order]
    assert past == sorted(past)
    learner.steps[0].scored |= {group.group_id for group in order[1:]}
    assert learner.next_piece() == []
    learner.steps[0].scored.add(order[0].group_id)
    assert learner.next_piece() == order
    assert learner.trained(order) and learner.next_piece() == []


def test_verl_s_rewards_begin_once_all_has_ended():
    (groups,) = training_workload(small(), 0, 1, 1).steps
    learner = Learner([groups], 0.5, None, late=True)
    assert [learner.ended(0, group, 1.0) for group in groups[:-1]] == [[]] * (len(groups) - 1)
    scored = learner.ended(0, groups[-1], 2.0)
    assert [at_s for at_s, _ in scored] == [2.0 + 0.5 * 3 * n for n in range(1, len(groups) + 1)]


def test_a_prompt_comes_again_an_epoch_later_with_its_own_history():
    steps = training_workload(small(), 0, 5, 2).steps
    first = {group.group_id: group for group in steps[0]}
    again = {group.group_id: group for group in steps[2]}
    assert first.keys() == again.keys() and first.keys().isdisjoint(group.group_id for group in steps[1])
    assert all(again[name].past_lengths[0] == first[name].lengths for name in first)
    assert [group.group_id for group in steps[0]] != [group.group_id for group in steps[2]]


def test_covered_seconds_count_once():
    assert covered_s([(0, 2), (1, 3), (5, 9), (6, 7)], 0.5, 8) == 5.5


def test_the_tail_begins_as_nine_tenths_have_ended():
    """Of ten samples the tail is from the ninth end to the tenth."""
    counts = {"prompts": 2, "samples": 5}
    scenario = small().model_copy(update={key: getattr(small(), key).scaled(n, 0.1) for key, n in counts.items()})
    host = host_of(scenario, mode("verl"), 3, 1, FIGURES)
    host.run()
    ((*_, ninth_s, tenth_s),) = host.ends_s()
    assert figures_of(host, scenario, mode("verl"), FIGURES)["tail_s"] == tenth_s - ninth_s > 0


def test_every_figure_says_where_it_is_from():
    assert all(kind in ("source", "assumed") and why for _, _, kind, why in FIGURES.notes())


def test_ratios_are_to_verl_seed_by_seed():
    def of(*seconds):
        return [{"step_s": value, "staleness_max": 1} for value in seconds]

    found = training_summary({"verl": of(10, 30), "sync": of(5, 10)})
    assert found["sync"]["ratio"] == [2.5, 2.0, 3.0] and found["verl"]["ratio"] == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="baseline"):
        training_summary({"sync": of(1)})


def test_a_prompt_does_not_come_again_while_it_runs(capsys):
    assert run(["simulate-training", "--steps", "20", "--max-staleness", "16"]) == 2
    assert "--max-staleness 16: give 15 at most" in capsys.readouterr().err


def test_the_command_prints_modes_as_json(capsys):
    arguments = ["simulate-training", "--workload", "dapo-32b", "--scale", "0.03", "--steps", "3", "--json"]
    assert not main([*arguments, "--train", "verl_apart"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found["modes"]) == ["verl", "verl_apart"] and found["modes"]["verl"]["ratio"] == [1.0, 1.0, 1.0]
    wanted = {"step_s", "ratio", "idle_share", "staleness_mean", "staleness_max"}
    assert all(wanted <= figures.keys() for figures in found["modes"].values())
