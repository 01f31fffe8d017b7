"""Rollouts on disk survive interruption: what is whole stays, what is half is cut, nothing is done twice."""

import json

import pytest

from tailrace.app.commands.rollout import _unfinished
from tailrace.app.errors import BadInput
from tailrace.app.files.results import ResultsFile
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, SampleResult
from tailrace.policies.protocol.actions import SampleEnd


def prompt(name: str, **changes) -> PromptGroup:
    return PromptGroup(prompt_id=name, text="hello", samples=1, **changes)


def group(name: str) -> GroupResult:
    sample = SampleResult(
        sample_index=0, token_ids=(5, 6), text="ab", logprobs=(-1.0, -2.0), raw_logprobs=(-1.0, -2.0),
        finish_reason=SampleEnd.STOP,
    )  # fmt: skip
    return GroupResult(batch_id="b", prompt_id=name, prompt_token_ids=(1, 2), samples=(sample,))


def write(path, names):
    results = ResultsFile(path)
    for name in names:
        results.append(group(name), prompt(name), 0, 0)
    results.close()


def test_a_second_run_does_only_what_is_missing(tmp_path):
    path = tmp_path / "deep" / "out.jsonl"
    write(path, ["a", "b"])
    results = ResultsFile(path)
    assert [p.prompt_id for p in results.missing([prompt("a"), prompt("b"), prompt("c")], 0, 0)] == ["c"]
    results.append(group("c"), prompt("c"), 0, 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prompt_id"] for line in lines] == ["a", "b", "c"]
    assert lines[0]["samples"][0]["token_ids"] == [5, 6]


def test_a_half_written_line_is_cut_off_and_done_again(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, ["a", "b"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    results = ResultsFile(path)
    assert [p.prompt_id for p in results.missing([prompt("a"), prompt("b")], 0, 0)] == ["b"]
    results.append(group("b"), prompt("b"), 0, 0)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("seed, step, changes", [(1, 0, {}), (0, 1, {}), (0, 0, {"max_tokens": 7})])
def test_other_settings_never_mix_with_what_is_there(tmp_path, seed, step, changes):
    path = tmp_path / "out.jsonl"
    write(path, ["a"])
    with pytest.raises(BadInput, match="prompt 'a' is there with other settings"):
        ResultsFile(path).missing([prompt("a", **changes)], seed, step)


@pytest.mark.parametrize("end, unfinished", [("stop", False), ("length", False), ("cancelled", True), ("failed", True)])
def test_a_cancelled_or_failed_sample_leaves_its_group_to_do(end, unfinished):
    (sample,) = group("a").samples
    assert _unfinished(sample.model_copy(update={"finish_reason": SampleEnd(end)})) is unfinished
