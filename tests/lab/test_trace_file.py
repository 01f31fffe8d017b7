"""Traces to replay: what is read, and that no group tells how long its samples are (law 3)."""

import gzip
import json

import pytest

from tailrace.app.errors import BadInput
from tailrace.app.files.traces import read_trace, replay_groups

LINE = {
    "prompt_id": 7,
    "prompt": "ab",
    "answer": "x",
    "epochs": [
        {"policy_step": 400, "samples": [{"text": "old", "reward": 0}]},
        {"policy_step": 800, "samples": [{"text": "newer", "reward": 1}, {"text": "n", "reward": 0}]},
    ],
}


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_last_checkpoint_is_replayed(tmp_path, name):
    path = tmp_path / name
    data = (json.dumps(LINE) + "\n").encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (group,) = replay_groups(read_trace(path), encode, prompts=5, samples=8, max_tokens=64)
    assert group.prompt_id == "7" and group.token_ids == (97, 98)
    assert group.forced_token_ids == (tuple(map(ord, "newer")), (110,))
    assert group.samples == 2 and group.max_tokens == 64, "the bound is the batch's, not the samples' own"


def test_a_sample_leaves_room_for_its_end_of_sequence():
    (group,) = replay_groups([LINE], encode, prompts=1, samples=1, max_tokens=3)
    assert group.forced_token_ids == (tuple(map(ord, "ne")),)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no prompt"),
        ("{", "line 1: not a trace line"),
        ('{"prompt_id": 1, "prompt": "x", "epochs": [1]}', "line 1: not a trace line"),
        ('{"prompt_id": 1, "prompt": "", "epochs": []}', "line 1: not a trace line: prompt: it is empty"),
        ('{"prompt_id": 1, "prompt": "x", "epochs": []}', "line 1: not a trace line: epochs: it is empty"),
        (
            '{"prompt_id": 1, "prompt": "x", "epochs": [{"policy_step": 0, "samples": []}]}',
            "line 1: not a trace line: epochs: the last one has no sample",
        ),
        (2 * (json.dumps(LINE) + "\n"), "line 2: not a trace line: prompt_id '.*' is on line 1 already"),
    ],
)
def test_bad_traces_name_file_and_line(tmp_path, text, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        read_trace(path)


def test_a_file_that_is_not_gzip(tmp_path):
    path = tmp_path / "bad.gz"
    path.write_text("plain")
    with pytest.raises(BadInput, match="cannot be read"):
        read_trace(path)


def test_the_recorded_trace_is_one(trace_path):
    lines = read_trace(trace_path)
    groups = replay_groups(lines, encode, prompts=3, samples=4, max_tokens=128)
    assert len(lines) == 40 and len(groups) == 3
    assert all(len(group.forced_token_ids) == 4 for group in groups)
