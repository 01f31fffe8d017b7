"""The papers' set-ups: figures say where they are from, published ones come out of what is drawn, errors name keys."""

from itertools import pairwise

import numpy as np
import pytest
import yaml
from law_fit import rank_stability

from tailrace.lab.simulator.acceptance import aimd_share, expected_tokens
from tailrace.lab.simulator.hardware import GPUS, replica_model
from tailrace.lab.simulator.scenario import FOLDER, load_scenario, scenario_names, trace_workload

NAMES = ["dapo-32b", "das-7b-16k", "grpo-32b", "kimi-k2", "moonlight", "ppo-32b", "qwen2-vl-72b", "rhyme-14b-16k"]


@pytest.fixture
def changed(tmp_path):
    """Loads the file of `moonlight` after a change to its data."""

    def load(change):
        data = yaml.safe_load((FOLDER / "moonlight.yaml").read_text())
        change(data)
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(data))
        return load_scenario(str(path))

    return load


def test_the_eight_workloads_are_there():
    assert scenario_names() == sorted([*NAMES, "tools-8b"])


def test_a_workload_of_turns_says_that_it_is_assumed_and_has_its_figures():
    scenario = load_scenario("tools-8b").scaled(0.1)
    (groups,) = scenario.workload(seed=3).steps
    kinds = {key: kind for key, _, kind, _ in scenario.notes()}
    assert {kinds[key] for key in kinds if key.startswith("turns.")} == {"assumed"}
    gaps = [gap for group in groups for sample in group.gaps for gap in sample]
    assert len(gaps) == sum(min(5, length) - 1 for group in groups for length in group.lengths)
    for group in groups:
        for length, sample in zip(group.lengths, group.gaps, strict=True):
            ends = [0, *(gap.tokens for gap in sample), length]
            assert all(before < after for before, after in pairwise(ends))
    assert np.mean([gap.tool_s for gap in gaps]) == pytest.approx(10, rel=0.15)
    assert np.mean([gap.outside_tokens for gap in gaps]) == pytest.approx(600, rel=0.15)
    fewer = load_scenario("tools-8b").scaled(0.05).workload(seed=3).steps[0]
    assert [group.gaps for group in fewer] == [group.gaps for group in groups[: len(fewer)]], "of each group alone"


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_where_it_is_from(name):
    """And the file's own words come back: nothing is lost, nothing has two reasons."""
    scenario = load_scenario(name)
    notes = scenario.notes()
    keys = [key for key, *_ in notes]
    assert len(set(keys)) == len(keys) >= 20 and {"gpus", "lengths.within", "claims.throughput_ratio"} <= set(keys)
    assert all(kind in ("source", "assumed") and text for _, _, kind, text in notes)
    assert scenario.gpu.value in GPUS and scenario.replicas >= 1
    assert all(low <= high for low, high in (claim.value for claim in scenario.claims.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_workload_has_the_scenarios_shape_and_its_law(name):
    scenario = load_scenario(name).scaled(0.1)
    workload = scenario.workload(seed=3)
    (groups,) = workload.steps
    lengths = np.array([group.lengths for group in groups])
    assert lengths.shape == (scenario.prompts.value, scenario.samples.value)
    assert lengths.min() >= 1 and lengths.max() <= workload.max_tokens == scenario.max_tokens.value
    means = lengths.mean(axis=1)
    assert means.mean() == pytest.approx(scenario.law().mean(), abs=4 * means.std() / len(means) ** 0.5)
    assert {len(group.past_lengths) for group in groups} == {scenario.epochs.value}
    assert scenario.workload(seed=3) == workload != scenario.workload(seed=4)


@pytest.mark.parametrize("name", NAMES)
def test_a_scenarios_model_fits_its_replicas(name):
    scenario = load_scenario(name)
    model = replica_model(scenario.gpu.value, scenario.model.value, scenario.gpus_per_replica.value)
    assert model.kv_capacity_tokens >= scenario.max_tokens.value + scenario.prompt_tokens.value


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_as_good_as_the_table_says(name):
    scenario = load_scenario(name)
    index, *others = scenario.drafting()
    drafts = scenario.acceptance.drafts.value
    for mates, answers, tokens in scenario.acceptance.table.value:
        chance = index.acceptance.mean_chance(index.acceptance.evidence(mates, answers))
        assert expected_tokens(chance, drafts) == pytest.approx(tokens)
    assert index.draft_s(64) == 0 and all(method.draft_s(64) > method.draft_s(1) > 1e-3 for method in others)


def test_ranks_are_as_stable_as_in_rhymerls_table_2():
    groups = [
        group for seed in range(2) for group in load_scenario("rhyme-14b-16k").scaled(0.5).workload(seed).steps[0]
    ]
    past, now = [group.past_lengths[0] for group in groups], [group.lengths for group in groups]
    assert rank_stability(past, now, 8) == pytest.approx(0.826, abs=0.03)
    assert rank_stability(past, now, 16) == pytest.approx(0.761, abs=0.05)


def test_history_drafts_are_as_often_right_as_in_rhymerls_7_2_2():
    scenario = load_scenario("rhyme-14b-16k")
    (index,) = scenario.drafting()
    share = aimd_share(index.acceptance.mean_chance(index.acceptance.evidence(0, scenario.samples.value)))
    low, high = scenario.claims["accepted_share"].value
    assert low < share < high and share == pytest.approx((low + high) / 2, abs=0.01)


def test_length_classes_are_those_of_das_tables_1_and_2():
    """28 % short, 13 % long; 80.43 % of answers are of the class of most of their prompt's earlier ones."""
    scenario = load_scenario("das-7b-16k")
    short, medium = sorted(scenario.lengths.quantiles.value.values())
    assert medium == pytest.approx((short + scenario.max_tokens.value) / 2, rel=1e-3)
    groups = [group for seed in range(2) for group in scenario.workload(seed).steps[0]]

    def classes(lengths):
        return np.searchsorted([short, medium], lengths, side="right")

    now = np.array([classes(group.lengths) for group in groups])
    told = [np.bincount(classes(np.concatenate(group.past_lengths)), minlength=3).argmax() for group in groups]
    assert np.bincount(now.ravel()) / now.size == pytest.approx([0.28, 0.59, 0.13], abs=0.04)
    assert (now == np.array(told)[:, None]).mean() == pytest.approx(0.8043, abs=0.04)


def test_steps_drift_and_remember():
    steps = load_scenario("rhyme-14b-16k").scaled(0.1).workload(seed=0, steps=4).steps
    assert len(steps) == 4
    for before, after in pairwise(steps):
        assert [group.past_lengths[0] for group in after] == [group.lengths for group in before]


def test_a_scaled_scenario_keeps_its_proportions():
    whole = load_scenario("dapo-32b")
    part = whole.scaled(0.25)
    assert (part.replicas, part.prompts.value, part.samples.value) == (16, 256, 16)
    assert "scaled by 0.25" in part.gpus.source and part.law() == whole.law()
    assert load_scenario("kimi-k2").scaled(0.001).replicas == 1
    with pytest.raises(ValueError, match="share of 0 to 1"):
        whole.scaled(2)


def test_an_unknown_name_is_told_its_neighbours():
    with pytest.raises(ValueError, match=r"^moonligt: no such scenario or file; did you mean moonlight\?$"):
        load_scenario("moonligt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(prompt={"value": 1, "source": "x"}), r"prompt: unknown key; did you mean prompts"),
        (lambda data: data["lengths"].update(withn=1), r"lengths\.withn: unknown key; did you mean within"),
        (lambda data: data["gpus"].pop("source"), r"gpus: say either where it is published"),
        (lambda data: data["gpus"].update(assumed="y"), r"gpus: say either where it is published"),
        (lambda data: data["gpus"].update(value=0), r"gpus\.value: .*greater than or equal to 1"),
        (lambda data: data["lengths"].pop("mean_tokens"), r"two figures fix a length law"),
        (lambda data: data.pop("model"), r"model: Field required"),
        (lambda data: data["acceptance"]["table"].update(value=[[0, 0, 20]]), r"no chance makes 20"),
    ],
)
def test_an_error_names_file_and_key_in_one_line(changed, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        changed(change)
    assert "mine.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "just words", ""])
def test_what_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.yaml: .*(YAML|mapping)"):
        load_scenario(str(path))


def test_recorded_lengths_become_a_step():
    lengths = {"a": [[9, 8, 7], [6, 5, 400], [3, 2, 1]], "b": [[4], [5], [0, 900]]}
    workload = trace_workload("t", lengths, {"a": 11, "b": 12}, max_tokens=100, samples=2)
    first, second = workload.steps[0]
    assert (first.lengths, first.past_lengths, first.prompt_tokens) == ((3, 2), ((6, 5), (9, 8)), 11)
    assert (second.lengths, second.past_lengths) == ((1, 100), ((5,), (4,)))
    with pytest.raises(ValueError, match="prompt a has no answer"):
        trace_workload("t", {"a": [[1], []]}, {"a": 1}, max_tokens=10)
