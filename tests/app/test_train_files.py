"""Files of the learner: configuration, rows, stored groups, the folder of a run."""

import json
import math
import subprocess
import sys

import pytest
from pydantic import BaseModel

from tailrace.app.errors import BadInput
from tailrace.app.train.record.accuracy import Accuracy, Mean
from tailrace.app.train.record.ledger import LedgerRow, Seconds, Staleness
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.record.stored_groups import StoredGroups, stored_groups
from tailrace.app.train.train_config import read_train_config
from tailrace.app.train.trl_keys import OURS
from tailrace.app.train.trl_settings import settings_of
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch, SampleResult

SMALL = "task: {name: gcd}\nsteps: 3\n"


class Row(BaseModel):
    step: int
    value: float


def config_of(tmp_path, text=SMALL):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    return read_train_config(path)


def test_a_torn_line_is_not_read_and_is_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = RowFile(path, Row)
    for step in (1, 2, 3):
        rows.append(Row(step=step, value=step / 3))
    path.write_text(path.read_text()[:-5])
    again = RowFile(path, Row)
    assert [row.step for row in again.rows] == [1, 2] and again.rows[0].value == 1 / 3
    again.truncate_after(1)
    again.append(Row(step=2, value=0.0))
    assert [row.value for row in RowFile(path, Row).rows] == [1 / 3, 0.0]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_step_without_a_finite_gradient_is_read_again(tmp_path, number):
    path, zeros = tmp_path / "ledger.jsonl", dict.fromkeys(LedgerRow.model_fields, 0)
    staleness, seconds = (dict.fromkeys(part.model_fields, 0.0) for part in (Staleness, Seconds))
    parts = {"weights_checksum": "c", "taken": (), "longest": {}, "staleness": staleness, "seconds": seconds}
    rows = RowFile(path, LedgerRow)
    rows.append(LedgerRow(**zeros | parts | {"step": 1, "grad_norm": number}))
    for _ in range(2):
        (row,) = RowFile(path, LedgerRow).rows
        assert repr(row) == repr(rows.rows[0]) and repr(row.grad_norm) == repr(number)
        rows.truncate_after(1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("task: {name: gcd}\nstep: 3", "train.yaml: step"),
        ("task: {}", "train.yaml: task: .*exactly one of name"),
        ("task: {name: gcd}\nsamples: 1", "train.yaml: samples"),
        ("task: {name: gcd}\nsampling: {stop_token_ids: [1]}", "stop_token_ids"),
        ("task: {name: gcd}\nsampling: {temperature: 0}", "sampling: .*nothing be learnt"),
        ("task: {name: gcd}\nsampling: {repetition_penalty: 1.2}", "temperature, top_p, top_k and min_p alone"),
        ("task: [", "train.yaml: line 1"),
    ],
)
def test_a_bad_configuration_is_one_line_with_its_key(tmp_path, text, fault):
    with pytest.raises(BadInput, match=fault) as error:
        config_of(tmp_path, text)
    assert "\n" not in str(error.value.message)


def test_what_a_run_sets_no_file_may_set_and_each_step_is_logged(tmp_path):
    settings = settings_of(config_of(tmp_path), "checkpoints")
    assert settings.keys() == set(OURS)
    every_step = {"logging_strategy": "steps", "logging_steps": 1}
    assert settings.items() >= every_step.items(), "the ledger is made from the log"


def test_a_folder_takes_one_run_whose_length_may_change(tmp_path):
    RunFolder(tmp_path / "run", config_of(tmp_path))
    RunFolder(tmp_path / "run", config_of(tmp_path, SMALL.replace("3", "9")))
    with pytest.raises(BadInput, match="it holds a run with learning_rate"):
        RunFolder(tmp_path / "run", config_of(tmp_path, SMALL + "learning_rate: 0.5\n"))


def test_a_folder_that_another_process_writes_is_refused_until_that_ends(tmp_path):
    config, folder = config_of(tmp_path), tmp_path / "run"
    lines = (
        "import sys, time; from pathlib import Path; from tailrace.app.train.record.run_folder import RunFolder",
        "from tailrace.app.train.train_config import read_train_config",
        "RunFolder(Path(sys.argv[1]), read_train_config(Path(sys.argv[2]))); print('begun', flush=True)",
        "time.sleep(300)",
    )
    other = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines), str(folder), str(tmp_path / "train.yaml")], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"begun\n"
        longer = config_of(tmp_path, SMALL.replace("3", "9"))
        with pytest.raises(BadInput, match="another run writes it now") as refused:
            RunFolder(folder, longer)
        assert "\n" not in refused.value.message and refused.value.exit_code == 2
        assert json.loads((folder / "config.json").read_text())["steps"] == config.steps, "nothing of it has changed"
    finally:
        other.kill()
        other.communicate()
    RunFolder(folder, longer)


def test_a_run_of_before_there_was_an_order_continues_by_shuffle(tmp_path):
    RunFolder(tmp_path / "run", config_of(tmp_path))
    file = tmp_path / "run" / "config.json"
    kept = json.loads(file.read_text())
    assert kept.pop("order") == "shuffle"
    file.write_text(json.dumps(kept))
    with pytest.raises(BadInput, match="it holds a run with order: 'shuffle', not 'by_length'"):
        RunFolder(tmp_path / "run", config_of(tmp_path, SMALL + "order: by_length\n"))
    RunFolder(tmp_path / "run", config_of(tmp_path))


def test_the_last_checkpoint_is_the_newest_whole_one(tmp_path):
    folder = RunFolder(tmp_path / "run", config_of(tmp_path))
    assert folder.last_checkpoint() is None
    for step in (9, 10, 20):
        (folder.checkpoints / f"checkpoint-{step}").mkdir()
    for step in (9, 10):
        (folder.checkpoints / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert folder.last_checkpoint() == (10, folder.checkpoints / "checkpoint-10")


def test_a_run_that_stopped_before_its_first_checkpoint_has_its_first_accuracy_once(tmp_path):
    zero = Mean(value=0.0, standard_error=0.0)
    for _ in range(2):
        folder = RunFolder(tmp_path / "run", config_of(tmp_path))
        assert folder.resume() == (0, None)
        folder.accuracies.append(Accuracy(step=0, questions=1, samples=0, greedy=zero, sampled=None))
    assert [row.step for row in folder.accuracies.rows] == [0]
    checkpoint = folder.checkpoints / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    folder.accuracies.append(Accuracy(step=4, questions=1, samples=0, greedy=zero, sampled=None))
    assert folder.resume() == (3, checkpoint) and [row.step for row in folder.accuracies.rows] == [0]


def batch_of(*prompt_ids):
    groups = tuple(PromptGroup(prompt_id=each, token_ids=(1, 2), samples=1) for each in prompt_ids)
    return RolloutBatch(batch_id="b", groups=groups, step=4)


def group_of(prompt, text="c", end="stop"):
    sample = SampleResult(
        sample_index=0, token_ids=(3,), text=text, logprobs=(0.0,), raw_logprobs=(0.0,), finish_reason=end
    )
    return GroupResult(
        batch_id="b", prompt_id=prompt.prompt_id, prompt_token_ids=prompt.token_ids, samples=(sample,), step=4
    )


def test_stored_groups_are_not_rolled_out_again_unless_the_weights_are_others(tmp_path):
    asked = []

    def roll_out(batch):
        asked.append([group.prompt_id for group in batch.groups])
        yield from map(group_of, batch.groups)

    first = StoredGroups(tmp_path, roll_out, lambda: "w1")
    begun = first.groups_of(batch_of("a", "b", "c"))
    kept = [next(begun), next(begun)]
    begun.close()  # the run is stopped
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text(path.read_text()[:-9])  # within the second group
    again = list(StoredGroups(tmp_path, roll_out, lambda: "w1").groups_of(batch_of("a", "b", "c")))
    assert again[0] == kept[0] and [group.prompt_id for group in again] == ["a", "b", "c"]
    assert asked == [["a", "b", "c"], ["b", "c"]]
    assert list(StoredGroups(tmp_path, roll_out, lambda: "w1").groups_of(batch_of("a", "b", "c"))) == again
    list(StoredGroups(tmp_path, roll_out, lambda: "w2").groups_of(batch_of("a", "b", "c")))
    assert asked[2:] == [["a", "b", "c"]]


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_group_with_a_sample_that_was_given_up_is_rolled_out_again(tmp_path, end):
    ends, asked = {"a": "length", "b": end}, []

    def roll_out(batch):
        asked.append([group.prompt_id for group in batch.groups])
        yield from (group_of(group, end=ends[group.prompt_id]) for group in batch.groups)

    def started():
        return list(StoredGroups(tmp_path, roll_out, lambda: "w1").groups_of(batch_of("a", "b")))

    given = started()
    assert [group.samples[0].finish_reason for group in given] == ["length", end], "the trainer raises the error"
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("a") as file:
        file.write(given[1].model_dump_json() + "\n")  # as earlier versions did
    ends["b"] = "stop"
    assert [group.samples[0].finish_reason for group in started()] == ["length", "stop"]
    assert asked == [["a", "b"], ["b"]] and started() and len(asked) == 2


def test_unicode_s_own_ends_of_lines_and_a_character_that_was_cut_off_lose_no_stored_group(tmp_path):
    texts, asked = {"a": "1\u20282\u20293\x854", "b": "5", "c": "6\u2028"}, []

    def roll_out(batch):
        asked.append([group.prompt_id for group in batch.groups])
        yield from (group_of(group, texts[group.prompt_id]) for group in batch.groups)

    given = list(StoredGroups(tmp_path, roll_out, lambda: "w1").groups_of(batch_of("a", "b", "c")))
    (path,) = tmp_path.glob("*.jsonl")
    assert stored_groups(tmp_path) == given
    written = path.read_bytes()
    path.write_bytes(written[: written.rindex("\u2028".encode()) + 1])  # within the character
    assert stored_groups(tmp_path) == given[:2]
    assert list(StoredGroups(tmp_path, roll_out, lambda: "w1").groups_of(batch_of("a", "b", "c"))) == given
    assert asked == [["a", "b", "c"], ["c"]]
