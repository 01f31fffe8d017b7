"""HistoPipe's benchmark: one order of prompts for all arrangements, drafts from the table, figures that agree."""

import json

import numpy as np
import pytest

from tailrace.app.cli import run
from tailrace.app.files.figures import PICTURE
from tailrace.app.files.output_file import OutputFile
from tailrace.lab.research.histopipe import bench
from tailrace.lab.research.histopipe.bench import DRAFTED, EPOCH_STEPS, aimd_verifications, history_drafts, steps_of
from tailrace.lab.simulator.acceptance import aimd_share
from tailrace.lab.simulator.hardware import replica_model
from tailrace.lab.simulator.scenario import load_scenario

SMALL = load_scenario("rhyme-14b-16k").scaled(0.1)
SMALL = SMALL.model_copy(update={
    "prompts": SMALL.prompts.scaled(6, 0.1), "samples": SMALL.samples.scaled(4, 0.25),
})  # fmt: skip
BASELINES = {"sequential": "ratio", "sequential_all": "ratio_equal_gpus", "overlapped": "ratio_overlapped"}


@pytest.fixture(scope="module")
def result() -> dict:
    return bench.measure(SMALL, 3, 2)


def test_every_prompt_comes_once_an_epoch_in_another_order_and_knows_its_last_lengths():
    steps = steps_of(SMALL, 1, 2 * EPOCH_STEPS)
    epochs = [[group for step in steps[n : n + EPOCH_STEPS] for group in step] for n in (0, EPOCH_STEPS)]
    first, second = ({group.group_id: group for group in epoch} for epoch in epochs)
    assert list(first) != list(second) and set(first) == set(second)
    assert len(first) == EPOCH_STEPS * SMALL.prompts.value
    assert all(second[name].past_lengths[0] == first[name].lengths for name in first)
    growth = np.log([np.mean(second[name].lengths) / np.mean(first[name].lengths) for name in first])
    assert growth.mean() == pytest.approx(EPOCH_STEPS * SMALL.lengths.drift.value, abs=0.06)


def test_fewer_steps_are_the_first_of_more_and_another_seed_gives_others():
    assert steps_of(SMALL, 1, 3) == steps_of(SMALL, 1, 5)[:3]
    assert steps_of(SMALL, 1, 3) != steps_of(SMALL, 2, 3)


@pytest.mark.parametrize("chance", [0.3, 0.7, 0.905, 0.97])
def test_drafts_are_what_the_window_makes_when_it_is_played(chance):
    """Verification by verification: windows grow by two after a draft that was right, and start at two again."""
    rng, window, drafted, right, count = np.random.default_rng(3), 2, 0, 0, 40_000
    for good in np.minimum(rng.geometric(1 - chance, count) - 1, 32).tolist():
        drafted, right = drafted + window, right + min(good, window)
        window = min(window + 2, 32) if good >= window else 2
    expected = chance / (1 - chance) / aimd_verifications(chance)
    assert right / count == pytest.approx(expected, rel=0.03)
    assert drafted / count == pytest.approx(expected / aimd_share(chance), rel=0.03)


def test_drafts_follow_the_scenario_and_stop_where_they_do_not_pay():
    model = replica_model("H800", "Qwen3-14B", 2)
    drafts = history_drafts(SMALL, model)
    low, high = SMALL.claims["accepted_share"].value
    whole = history_drafts(load_scenario("rhyme-14b-16k"), model)
    assert low < (whole.tokens_per_step - 1) / whole.drafted < high, "the scenario's table was derived from this share"
    assert whole.tokens_per_step > drafts.tokens_per_step, "fewer answers, less history"
    table = SMALL.acceptance.table.model_copy(update={"value": ((0, 0, 1.759), (0, 64, 2.5))})
    worse = SMALL.model_copy(update={"acceptance": SMALL.acceptance.model_copy(update={"table": table})})
    assert 1 < history_drafts(worse, model).tokens_per_step < drafts.tokens_per_step
    slow = model.step.__class__(model.step.base_s, 100 * model.step.token_s, model.step.context_s)
    costly = history_drafts(worse, type(model)(slow, *_rest(model)))
    assert 0 < costly.most_running < history_drafts(worse, model).most_running < drafts.most_running
    assert drafts.most_running == model.max_running, "drafts that are mostly right pay at every batch size"


def _rest(model) -> list:
    return [getattr(model, name) for name in model.__slots__ if name != "step"]


ARRANGEMENTS = ("sequential", "sequential_all", "overlapped", "naive", "alternating", "tiers")


def test_ratios_are_of_the_same_steps_and_spreads_hold_their_means(result):
    runs = result["runs"]
    assert set(runs) == {*ARRANGEMENTS, *(name + DRAFTED for name in ARRANGEMENTS)}
    assert all(set(rows) == set(ARRANGEMENTS) for rows in result["regimes"].values())
    for name, key in BASELINES.items():
        assert runs[name][key] == [1.0, 1.0, 1.0]
    for rows in (runs, *result["regimes"].values()):
        for row in rows.values():
            assert all(low <= mean <= high for mean, low, high in row.values())
    assert runs["overlapped"]["ratio"][1] > 1 and runs["naive"]["ratio_overlapped"][1] >= 1
    assert runs["sequential_all"]["ratio"][1] > 1
    assert runs["tiers" + DRAFTED]["total_s"][2] < runs["tiers"]["total_s"][1]


def test_the_paper_s_claims_stand_beside_what_was_found_and_not_beside_other_workloads(result):
    claims = result["claims"]
    assert {name: tuple(row["claimed"]) for name, row in claims.items()} == {
        name: known.value for name, known in SMALL.claims.items()
    }
    other = load_scenario("das-7b-16k").scaled(0.1)
    other = other.model_copy(update={"prompts": other.prompts.scaled(2, 0.1), "samples": other.samples.scaled(2, 0.1)})
    assert bench.measure(other, 1, 1)["claims"] == {}


@pytest.mark.slow
def test_the_same_seeds_give_the_same_bytes_and_a_picture(result, tmp_path):
    from tailrace.lab.research.histopipe.picture import pipelines

    assert json.dumps(bench.measure(SMALL, 3, 2)) == json.dumps(result)
    pipelines(OutputFile(tmp_path / "runs.svg", "--plot", PICTURE), result)
    assert (tmp_path / "runs.svg").read_text().count("<path") > 2 * 3 * len(ARRANGEMENTS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--workload", "rhyme"), "rhyme-14b-16k"), (("--plot", "runs.txt"), ".png"), (("--plot", "/no/a.png"), "folder")],
)
def test_bad_input_is_one_line_that_helps(capsys, arguments, said):
    assert run(["bench", "pipeline", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and said in error
