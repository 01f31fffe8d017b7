"""Dumps of verl and TRL, our own results and traces become history: each answer once, bad lines named."""

import gzip
import json
import math

import pytest

from tailrace.app.cli import run
from tailrace.app.errors import BadInput
from tailrace.app.files.dumps import read_dump
from tailrace.app.files.history_import import HistoryImport
from tailrace.app.files.results import ResultsFile
from tailrace.deployments.context.archive import Archive
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.history import prompt_key
from tailrace.deployments.context.prompt_files import EVERY
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, SampleResult, Segment
from tailrace.policies.protocol.actions import SampleEnd


class Letters:
    """A tokenizer: letters, and `|` as a special token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(token) for token in token_ids if chr(token) != "|")

    def foreign(self, token_ids: list[int]) -> int | None:
        return next((token for token in token_ids if token >= 1000), None)


VERL = [
    {"input": "user\nhi\n", "output": "one", "gts": "1", "score": 1.0, "step": 3, "acc": True},
    {"input": "user\nhi\n", "output": "two", "gts": "1", "score": 0.0, "step": 3, "acc": False},
    {"input": "user\nho\n", "output": "three", "gts": "1", "score": 0.5, "step": 4, "acc": False},
]
TRL = [
    {"step": "3", "prompt": "|user\nhi\n|", "completion": "one", "accuracy_reward": 1.0, "format_reward": 0.5},
    {"step": "3", "prompt": "|user\nhi\n|", "completion": "two", "reward_len": math.nan, "format_reward": 0.25},
    {"step": 4, "prompt": "|user\nho\n|", "completion": "three", "reward": 0.5, "rewards_sum": 9, "advantage": 2},
]  # fmt: skip
TRL_COLUMNS = [
    {
        "step": 3,
        "prompt": ["user\nhi", "user\nhi"],
        "completion": ["one", "two"],
        "reward": [1.5, 0.25],
        "mode": "train",
    },
    {"step": [4], "prompt": ["user\nho"], "completion": ["three"], "reward": [0.5]},
]
TRACE = [
    {"prompt_id": 1, "prompt": "user\nhi", "answer": "", "epochs": [
        {"policy_step": 3, "samples": [{"text": "one", "reward": 1.5}, {"text": "two", "reward": 0.25}]}]},
    {"prompt_id": 2, "prompt": "user\nho", "epochs": [
        {"policy_step": 4, "samples": [{"text": "three", "reward": 0.5}]}]},
]  # fmt: skip


def write(path, lines):
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def archive_in(folder) -> Archive:
    return Archive(ContextConfig(history_dir=str(folder)), EVERY)


def taken(folder, *paths, epoch=None, weights_version=0) -> dict[str, int]:
    work = HistoryImport(archive_in(folder), Letters(), epoch, weights_version)
    for path in paths:
        work.add(path, lambda read_bytes: None)
    return work.summary()


def kept(folder, text: str) -> list[tuple]:
    key = prompt_key(text)
    found = archive_in(folder).of(key).answers(key, but_not_of="")
    return [(a.epoch, Letters().decode(a.tokens.tolist()), a.reward, a.weights_version) for a in found]


@pytest.mark.parametrize(
    ("lines", "rewards"),
    [(VERL, (1.0, 0.0)), (TRL, (1.5, 0.25)), (TRL_COLUMNS, (1.5, 0.25)), (TRACE, (1.5, 0.25))],
    ids=["verl", "trl", "trl-columns", "trace"],
)
@pytest.mark.parametrize("name", ["dump.jsonl", "dump.jsonl.gz"])
def test_every_form_says_the_same(tmp_path, lines, rewards, name):
    path = write(tmp_path / name, lines)
    summary = {"files": 1, "prompts": 2, "answers": 3, "tokens": 11, "epochs": 2}
    assert taken(tmp_path / "history", path) == summary | {"skipped": 0}
    assert kept(tmp_path / "history", "user\nhi") == [(3, "one", rewards[0], 0), (3, "two", rewards[1], 0)]
    assert kept(tmp_path / "history", "user\nho") == [(4, "three", 0.5, 0)]
    assert taken(tmp_path / "history", path) == summary | {"skipped": 3}, "twice changes nothing"
    assert len(kept(tmp_path / "history", "user\nhi")) == 2


def test_our_own_results_are_taken_with_their_weights_and_ends(tmp_path):
    def sample(index, end, token_ids):
        segments = (Segment(weights_version=2, replica_id="a", start=0, end=1),) * 2
        return SampleResult(
            sample_index=index, token_ids=token_ids, text="", logprobs=(), raw_logprobs=(), finish_reason=end,
            segments=segments,
        )  # fmt: skip

    samples = (
        sample(0, SampleEnd.STOP, (120, 121)),
        sample(1, SampleEnd.LENGTH, (122,)),
        sample(2, SampleEnd.STOP, ()),
    )
    group = GroupResult(batch_id="b", prompt_id="p", prompt_token_ids=tuple(map(ord, "|hi|")), samples=samples)
    results = ResultsFile(tmp_path / "out.jsonl")
    results.append(group, PromptGroup(prompt_id="p", text="hi", samples=3), 0, 0)
    results.close()
    summary = taken(tmp_path / "history", results.path, epoch=6, weights_version=9)
    assert summary == {"files": 1, "prompts": 1, "answers": 3, "tokens": 3, "epochs": 1, "skipped": 1}
    assert kept(tmp_path / "history", "hi") == [(6, "xy", None, 2), (6, "z", None, 2)]
    key = prompt_key("hi")
    history = archive_in(tmp_path / "history").of(key)
    assert [length.finished for length in history.lengths(key)] == [True, False]
    assert history.find("p") == (key, "out.jsonl/p")


def test_an_epoch_and_a_version_that_are_given_hold(tmp_path):
    path = write(tmp_path / "dump.jsonl", VERL)
    taken(tmp_path / "history", path, epoch=9, weights_version=5)
    assert kept(tmp_path / "history", "user\nho") == [(9, "three", 0.5, 5)]


def test_files_of_one_call_are_numbered_on(tmp_path):
    paths = [write(tmp_path / f"{number}.jsonl", VERL[:1]) for number in range(3)]
    assert taken(tmp_path / "history", *paths)["files"] == 3
    assert len(kept(tmp_path / "history", "user\nhi")) == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a JSON object is needed"),
        ('{"text": 1}', "line 2: no rollout that is known here"),
        ('{"input": 1, "output": "x"}', "line 2: input: Input should be a valid string"),
        ('{"input": "a", "output": "x", "step": -1}', "line 2: step: "),
        ('{"prompt": [{"role": "user"}], "completion": ["x"]}', "line 2: prompt: chats are not taken"),
        ('{"prompt": [[{"role": "user"}]], "completion": [[{"role": "a"}]]}', "line 2: prompt: chats are not taken"),
        ('{"prompt": "a", "completion": [{"role": "a"}]}', "line 2: completion: chats are not taken"),
        ('{"prompt": "a", "completion": "x", "step": 99999999999999999999}', "line 2: step: Input should be less"),
        ('{"prompt": "a", "completion": "x", "step": 1e400}', "line 2: step: Input should be a finite number"),
        ('{"prompt": "\\ud83d", "completion": "x"}', "line 2: prompt: a \\u escape is half"),
        (
            '{"prompt_id": "a", "prompt_token_ids": [1], "samples": [{"sample_index": 99999999999999999999, '
            '"token_ids": [1], "finish_reason": "stop"}]}',
            "line 2: samples.0.sample_index: ",
        ),
        ('{"prompt": ["a", "b"], "completion": ["x"]}', "line 2: completion: has 1 values for 2 prompts"),
        ('{"prompt": "a", "completion": "x", "reward": "good"}', "line 2: rewards.reward: "),
        ('{"prompt_id": "a", "prompt_token_ids": [-1], "samples": []}', "line 2: prompt_token_ids.0: "),
        (
            '{"prompt_id": "a", "prompt_token_ids": [1], "samples": [{"sample_index": 0}]}',
            "line 2: samples.0.token_ids",
        ),
        ('{"prompt_id": 1, "prompt": "a", "epochs": [{"samples": []}]}', "line 2: epochs.0.policy_step: "),
    ],
)
def test_a_bad_line_is_named_and_what_came_before_it_stays(tmp_path, line, said):
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(VERL[0]) + "\n" + line + "\n" + json.dumps(VERL[2]) + "\n")
    with pytest.raises(BadInput) as error:
        taken(tmp_path / "history", path)
    assert f"{path} {said}" in error.value.message
    assert len(kept(tmp_path / "history", "user\nhi")) == 1 and kept(tmp_path / "history", "user\nho") == []


@pytest.mark.parametrize("spoil", [lambda data: b"plain", lambda data: data[:-9], lambda data: data[:30] + b"\0" * 40])
def test_a_bad_gzip_file_is_named(tmp_path, spoil):
    path = write(tmp_path / "dump.jsonl.gz", VERL)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(BadInput, match=str(path)):
        list(read_dump(path, lambda read_bytes: None))


def test_the_recorded_trace_is_taken(trace_path, tmp_path):
    with gzip.open(trace_path) as file:
        lines = [json.loads(next(file)) for _ in range(2)]
    summary = taken(tmp_path / "history", write(tmp_path / "part.jsonl", lines))
    assert (summary["prompts"], summary["answers"], summary["epochs"]) == (2, 200, 2)


# ---- the commands --------------------------------------------------------------------------------------


@pytest.fixture
def history_dir(tmp_path):
    taken(tmp_path / "history", write(tmp_path / "dump.jsonl", TRACE))
    return tmp_path / "history"


def answered(capsys, *arguments) -> dict:
    assert run([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refused(capsys, *arguments) -> str:
    assert run(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_list_inspect_forget(history_dir, capsys):
    listed = answered(capsys, "history", "list", "--history-dir", history_dir)
    assert listed["packed_bytes"] > 0
    del listed["packed_bytes"]
    assert listed == {"prompts": 2, "answers": 3, "tokens": 11, "oldest_epoch": 3, "newest_epoch": 4}
    known = answered(capsys, "drafts", "inspect", "1", "--history-dir", history_dir)
    (epoch,) = known["history"]
    assert known["prompt_key"] == prompt_key("user\nhi") and known["samples"] == []
    assert (epoch["answers"], epoch["mean_length_tokens"], epoch["mean_reward"]) == (2, 3.0, 0.875)
    assert run(["drafts", "inspect", "1", "--history-dir", str(history_dir)]) == 0
    assert "0.875" in capsys.readouterr().out
    assert answered(capsys, "history", "forget", "1", "--history-dir", history_dir) == {"forgotten_answers": 2}
    assert "no such group" in refused(capsys, "drafts", "inspect", "1", "--history-dir", history_dir)
    assert answered(capsys, "history", "forget", "--all", "--history-dir", history_dir) == {"forgotten_answers": 1}


def test_bad_input_to_the_commands_is_one_line(history_dir, tmp_path, capsys):
    missing = tmp_path / "none.jsonl"
    said = refused(capsys, "history", "import", missing, "--history-dir", history_dir)
    assert f"{missing}: no such file" in said
    assert "give a prompt or --all" in refused(capsys, "history", "forget", "--history-dir", history_dir)
    assert "knows no prompt '9'" in refused(capsys, "history", "forget", "9", "--history-dir", history_dir)
    (history_dir / "history-0.sqlite").write_bytes(b"not a database, and too long to be an empty one" * 30)
    assert "not usable as history" in refused(capsys, "history", "list", "--history-dir", history_dir)
    dump = tmp_path / "dump.jsonl"
    assert "not usable as history" in refused(capsys, "history", "import", dump, "--history-dir", history_dir)
