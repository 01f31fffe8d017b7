"""The replay of the draft benchmark: what it counts, what it refuses, and what the index reaches on real rollouts."""

from pathlib import Path

import numpy as np
import pytest

from tailrace.app.errors import BadInput
from tailrace.app.files.traces import read_trace
from tailrace.app.model import demo_model_dir
from tailrace.lab.benchmarks.drafting import drafts_joined, drafts_refused
from tailrace.lab.benchmarks.drafting.drafts import SETTINGS, Setting, read_rollouts, replay, replay_arctic

TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "amc23.jsonl.gz"


def line(name, *epochs) -> dict:
    return {
        "prompt_id": name,
        "prompt": "p q r",
        "epochs": [{"policy_step": n, "samples": [{"text": text} for text in texts]} for n, texts in enumerate(epochs)],
    }


def encode(text: str) -> list[int]:
    return [sum(word.encode()) for word in text.split()]


def test_the_last_two_samples_are_the_targets_and_the_checkpoint_before_is_history():
    texts = [f"sample {number}" for number in range(20)]
    [found] = read_rollouts([line("a", ["never"], ["old 1", "old 2"], texts)], encode)
    assert [target.tolist() for target in found.targets] == [encode("sample 18"), encode("sample 19")]
    assert [mate.tolist() for mate in found.mates] == [encode(text) for text in texts[:15]]
    assert [answer.tokens.tolist() for answer in found.history] == [encode("old 1"), encode("old 2")]


def test_a_trace_with_few_samples_uses_what_is_there():
    [found] = read_rollouts([line("a", ["x", "y", "z"])], encode)
    assert (len(found.targets), len(found.mates), len(found.history)) == (2, 1, 0)
    assert not any(mate.tolist() == target.tolist() for mate in found.mates for target in found.targets)


@pytest.mark.parametrize("epochs", [[], [["x", "y"]]])
def test_a_prompt_with_nothing_to_draft_from_is_named(epochs):
    with pytest.raises(BadInput, match=r"^b: "):
        read_rollouts([line("a", ["x", "y", "z"]), line("b", *epochs)], encode)


@pytest.mark.parametrize("play", [replay, replay_arctic])
def test_a_copy_is_drafted_nearly_whole_and_noise_is_not(play):
    rng = np.random.default_rng(0)
    copies = " ".join(map(str, range(200)))
    [found] = read_rollouts(
        [line("a", [copies] * 3)], lambda text: [int(w) for w in text.split() if w.isdigit()] or [1]
    )
    tally = play([found], Setting(mates=1))
    assert tally.tokens == 400
    assert tally.tokens_per_step > 6
    noise = found._replace(targets=[rng.integers(1000, 30_000, 200).astype(np.int32)])
    assert play([noise], Setting(mates=1)).tokens_per_step < 1.05


def test_a_target_is_drafted_from_the_prompts_before_it_and_from_no_later_target():
    """Two prompts share their answer. The second one's target is drafted from the first prompt's, each time."""
    words = " ".join(map(str, range(300, 400)))
    lines = [line(name, ["one 1", words, words]) for name in ("a", "b")]
    found = read_rollouts(lines, lambda text: [int(w) for w in text.split() if w.isdigit()] or [7])
    assert replay(found[:1], Setting()).tokens_per_step < 1.1
    both = replay(found, Setting())
    assert both.steps < 1.3 * replay(found[:1], Setting()).steps, "the second prompt's targets take few steps"
    assert (
        replay_arctic(found, Setting()).tokens_per_step
        < 1.1
        < replay_arctic(found, Setting(), kept=True).tokens_per_step
    )


@pytest.fixture(scope="module")
def rollouts():
    if not TRACE.is_file() or not (demo_model_dir() / "tokenizer.json").is_file():
        pytest.skip("needs the trace of real rollouts and the demo model's tokenizer")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))
    return read_rollouts(read_trace(TRACE)[::8], lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def tallies(rollouts):
    """Of a sample of the prompts; the whole trace is `bench drafts`."""
    return {name: replay(rollouts, SETTINGS[name]) for name in ("mates_15", "history_16_mates_7", "mates_15_paths_4")}


@pytest.mark.slow
def test_real_rollouts_are_drafted_better_than_by_the_longest_match(rollouts, tallies):
    for name, ours in tallies.items():
        assert ours.tokens_per_step > 1.05 * replay_arctic(rollouts, SETTINGS[name]).tokens_per_step


def test_on_real_rollouts_probabilities_are_right(tallies):
    tally = tallies["mates_15"]
    assert tally.bins[:, 0].sum() > 2000
    assert tally.calibration_gap < 0.07
    assert tally.index_bytes / tally.index_tokens <= 200


@pytest.mark.slow
def test_refusals_are_split_and_oracles_are_above_the_draft(rollouts, tallies):
    found = drafts_refused.measure(rollouts, SETTINGS["mates_15"])
    refused, oracle = found["refused"], found["oracle"]
    assert abs(sum(refused.values()) - 1) < 0.01 and refused["wrong_branch"] > refused["stopped_by_length"] > 0
    assert min(oracle.values()) > tallies["mates_15"].tokens_per_step
    assert oracle["paths_2"] < oracle["paths_4"] < oracle["paths_8"]


@pytest.mark.slow
def test_a_draft_model_and_the_index_bring_more_in_one_tree_than_either_first(rollouts, tallies):
    found = drafts_joined.measure(rollouts, SETTINGS["mates_15"])
    index = tallies["mates_15"].tokens_per_step
    assert found["0.7"]["joined"] > 1.03 * max(index, found["0.7"]["model_first"])
    for chance, ways in found.items():
        assert ways["joined"] > ways["model_first"] and ways["joined"] > 0.99 * index, chance
