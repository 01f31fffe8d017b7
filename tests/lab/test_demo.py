"""The demo: its recording is of the same samples in both runs, the replay shows it without an engine, and README and
page say its figures."""

import gzip
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_sim_page import Reader, data_of

from tailrace.app.cli import run
from tailrace.app.config import load_config
from tailrace.app.errors import BadInput
from tailrace.lab.commands.demo import NEXT
from tailrace.lab.demo.film import ended, play
from tailrace.lab.demo.outcome import HEADS, NAMES, RECORDED, read, table, write
from tailrace.lab.demo.page import page
from tailrace.lab.demo.runs import policies_of, same_samples

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture(scope="module")
def outcome():
    return read(RECORDED)


@pytest.fixture(scope="module")
def figures(outcome):
    return outcome.figures()


def test_both_recorded_runs_made_the_same_tokens_of_every_sample(outcome, figures):
    static, ours = ({each.sample_id: each.tokens for each in one.run.ended} for one in outcome.records.values())
    assert static == ours and len(static) == figures["same_samples"]
    assert not any(record.dropped for record in outcome.records.values())


def test_the_recorded_workload_has_a_tail(outcome):
    tokens = sorted(each.tokens for each in outcome.records["static"].run.ended)
    assert tokens[-1] > 5 * tokens[len(tokens) // 2]


def test_static_groups_stay_where_they_are_and_ours_move(figures):
    assert figures["runs"]["static"]["moves"] == 0 < figures["runs"]["tailrace"]["moves"]
    assert figures["runs"]["static"]["chunks"] == figures["runs"]["static"]["samples"]
    assert figures["ratio"] > 1


def test_the_readme_has_the_recorded_figures(figures):
    assert f"{figures['ratio']:.2f} times as fast as static groups" in README
    for one in figures["runs"].values():
        assert f"{one['makespan_s']:.0f} s" in README


def test_the_page_shows_both_runs_whole(outcome, figures):
    text = page(outcome, figures)
    said, data = " ".join(Reader(text).texts), data_of(text)
    assert all(name in said for name in NAMES.values()) and f"{figures['ratio']:.2f} ×" in said
    assert [one["system"] for one in data["runs"]] == list(NAMES.values())
    assert len(data["samples"]) == figures["runs"]["static"]["samples"]


def test_the_page_claims_the_same_tokens_of_samples_that_have_them(outcome, figures):
    assert "as fast, the same tokens</p>" in page(outcome, figures)
    samples = figures["same_samples"]
    text = page(outcome, figures | {"same_samples": samples - 3})
    assert f"as fast, the same tokens in {samples - 3} of {samples} samples</p>" in text


def test_a_replay_writes_its_page_and_says_the_figures(tmp_path, capsys, figures):
    assert run(["demo", "--replay", "--out", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["ratio"] == figures["ratio"]
    assert Path(said["page"]).read_text().startswith("<!DOCTYPE html>")


def test_the_film_ends_with_every_sample(outcome, capsys):
    play(outcome, seconds=0.0)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.findall(r"(\d+)/(\d+)", last) == [(str(outcome.about["same_samples"]),) * 2] * 2
    assert [ended([1.0, 2.0, 2.0], at_s) for at_s in (0.5, 1.0, 1.5, 2.0)] == [0, 1, 1, 3]


def test_what_is_written_is_read_again_and_the_same_runs_are_the_same_bytes(outcome, tmp_path):
    journals = {name: gzip.decompress((RECORDED / f"{name}.journal.gz").read_bytes()).decode() for name in NAMES}
    write(tmp_path, journals, outcome.about)
    first = (tmp_path / "static.journal.gz").read_bytes()
    write(tmp_path, journals, outcome.about)
    assert read(tmp_path) == outcome and (tmp_path / "static.journal.gz").read_bytes() == first


@pytest.mark.parametrize("damage", ["about.json", "static.journal.gz", "tailrace.journal.gz"])
def test_a_damaged_folder_is_named(tmp_path, damage):
    shutil.copytree(RECORDED, tmp_path / "demo")
    (tmp_path / "demo" / damage).write_bytes((RECORDED / damage).read_bytes()[:-9])
    with pytest.raises(BadInput, match="holds no demo"):
        read(tmp_path / "demo")
    (tmp_path / "demo" / damage).unlink()
    with pytest.raises(BadInput, match=damage):
        read(tmp_path / "demo")


def test_a_table_has_a_cell_for_each_head(figures):
    assert {len(row) for row in table(figures)} == {len(HEADS)}


def test_the_baseline_binds_groups_and_ours_are_the_configured_policies():
    file = load_config()
    static, ours = policies_of(file).values()
    assert (static.ordering.type, static.placement.type, static.drafting.type) == ("group_static", "pinned", "off")
    assert static.chunking.chunk_tokens is None
    assert ours == file.application.policies


def group(prompt_id, *samples):
    each = [SimpleNamespace(sample_index=index, token_ids=tokens) for index, tokens in enumerate(samples)]
    return SimpleNamespace(prompt_id=prompt_id, samples=each)


def test_samples_are_compared_by_prompt_and_index():
    one = [group("a", [1, 2], [3]), group("b", [4])]
    assert same_samples(one, [group("b", [4]), group("a", [1, 2], [3, 5])]) == 2
    assert same_samples(one, [group("b", [9])]) == 0


@pytest.mark.parametrize("after", sorted(NEXT))
def test_the_next_commands_are_three_and_exist(after, capsys):
    assert len(NEXT[after]) == 3
    for arguments, _ in NEXT[after]:
        assert run([arguments.split()[0], "--help"]) == 0
        options = re.findall(r"--[a-z]+", arguments)
        assert all(option in capsys.readouterr().out for option in options[:1])
