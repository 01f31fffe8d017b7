"""Rollouts on disk survive interruption: what is whole stays, what is half is cut, nothing is done twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.app.commands.rollout import _unfinished
from tailrace.app.errors import BadInput
from tailrace.app.files.results import ResultsFile
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, SampleResult, Segment
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


def test_two_runs_never_write_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    first = ResultsFile(path)
    with pytest.raises(BadInput, match=r"out.jsonl: another run writes it now; wait for its end"):
        ResultsFile(path)
    first.close()
    ResultsFile(path).close()


def test_groups_of_other_weights_never_mix_with_those_that_are_there(tmp_path):
    path = tmp_path / "out.jsonl"
    results = ResultsFile(path)
    segment = Segment(weights_version=0, weights_digest="abc", replica_id="r", start=0, end=2)
    (sample,) = group("a").samples
    made = group("a").model_copy(update={"samples": (sample.model_copy(update={"segments": (segment,)}),)})
    results.append(made, prompt("a"), 0, 0)
    results.close()
    again = ResultsFile(path)
    again.check_weights("abc")
    again.check_weights("")
    with pytest.raises(BadInput, match="its groups are of weights abc, the service has def; give another --out"):
        again.check_weights("def")


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_results_file import group, prompt
from tailrace.app.errors import Failed
from tailrace.app.files.results import ResultsFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
results = ResultsFile(Path(sys.argv[1]))
try:
    for number in range(100):
        results.append(group(f"g{number}"), prompt(f"g{number}"), 0, 0)
except Failed as failed:
    print(failed.exit_code, len(results.done), failed)
"""
"""The system refuses writes beyond 1,000 bytes, after a part of a line: as on a disk that is full."""


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_keeps_the_groups_that_are_there(tmp_path):
    path = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", FULL_DISK, str(path), str(Path(__file__).parent)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept = path.read_bytes().count(b"\n")
    assert said.startswith(f"1 {kept} {path}: File too large; {kept} groups are in it") and kept > 0
    assert path.read_bytes().endswith(b"}\n")
    results = ResultsFile(path)
    assert len(results.done) == kept
    assert [p.prompt_id for p in results.missing([prompt("g0"), prompt("new")], 0, 0)] == ["new"]
