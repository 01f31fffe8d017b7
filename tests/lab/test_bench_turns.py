"""`bench turns`: what it asks, and what it reports of both modes."""

import json

import pytest

from tailrace.app.cli import run


@pytest.mark.slow
def test_held_turns_compute_less_again_than_requests(capsys):
    assert run(["bench", "turns", "--scale", "0.02", "--seeds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (result["workload"], result["replicas"], result["samples"]) == ("tools-8b", 1, 16 * 8)
    assert result["recomputed_share"]["held"][2] < 0.05 < result["recomputed_share"]["requests"][1]
    assert result["makespan_ratio"][1] > 1.0
    for held, requests in zip(result["runs"]["held"], result["runs"]["requests"], strict=True):
        same = ("tokens", "turns", "returned_tokens")
        assert [held[key] for key in same] == [requests[key] for key in same]
        assert held["turns"] > 4 * result["samples"] and held["acceptance_length"] > requests["acceptance_length"]


@pytest.mark.slow
def test_without_drafts_kv_and_lengths_alone_are_compared(capsys):
    assert run(["bench", "turns", "--scale", "0.02", "--seeds", "2", "--drafting", "off", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert {one["acceptance_length"] for of in result["runs"].values() for one in of} == {1.0}
    assert result["makespan_ratio"][0] > 1.0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--workload", "moonlight"], "moonlight"),
        (["--workload", "tools"], "tools-8b"),
        (["--live", "--turns", "900"], "--turns"),
        (["--turns", "1"], "--turns"),
        (["--drafting", "goodputt"], "--drafting goodputt"),
    ],
)
def test_bad_input_is_one_line_that_names_it(capsys, given, named):
    assert run(["bench", "turns", *given]) == 2
    error = capsys.readouterr().err.strip()
    assert named in error.splitlines()[-1]
