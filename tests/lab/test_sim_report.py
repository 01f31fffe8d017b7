"""Laws of the report: a run's figures, ratios seed by seed, the same bytes for the same runs, one line on bad input."""

import json
from dataclasses import replace

import pytest
from sim_runs import make_run

from tailrace.app.errors import BadInput
from tailrace.lab.commands.compare import command
from tailrace.lab.report.simulation_page import page
from tailrace.lab.simulator.report import (
    CLAIRVOYANT,
    account_rows,
    compare,
    number,
    ratios,
    rows,
    summary,
)
from tailrace.lab.simulator.types import Ended, Moment, SimulatedRun, Span

SEEDS = range(3)


def ended(index: int, end_s: float, step: int = 0, submitted_s: float = 0.0) -> Ended:
    return Ended(f"s{index:02}", step, 10, submitted_s, end_s, 1, 0, 0, 0, 5.0, 0.0, 0.0)


def run_of(samples: list[Ended], **fields) -> SimulatedRun:
    makespan_s = max((sample.ended_s for sample in samples), default=0.0)
    return replace(SimulatedRun("a", "w", 0, makespan_s, tuple(samples), (), (), 1, {}), **fields)


def systems() -> dict[str, list[SimulatedRun]]:
    return {
        "static": [make_run("static", seed) for seed in SEEDS],
        "longest": [make_run("longest", seed, drafts=1.5) for seed in SEEDS],
    }


def test_the_tail_is_the_time_of_the_last_tenth():
    one = summary(run_of([ended(i, float(i + 1)) for i in range(9)] + [ended(9, 29.0)]))
    assert (one["makespan_s"], one["tail_s"], one["tail_share"]) == (29.0, 20.0, round(20 / 29, 6))
    assert one["mean_sample_s"] == 7.4 and one["tokens_per_s"] == round(100 / 29, 5)


def test_each_step_has_its_own_tail_and_samples_count_from_their_submission():
    first = [ended(i, 1.0) for i in range(9)] + [ended(9, 4.0)]
    second = [ended(i, 5.0, 1, 4.0) for i in range(10, 19)] + [ended(19, 9.0, 1, 4.0)]
    one = summary(run_of(second + first))
    assert one["tail_s"] == 3.0 + 4.0
    assert one["mean_sample_s"] == round((9 * 1 + 4 + 9 * 1 + 5) / 20, 6)


def test_a_replica_is_idle_when_none_of_its_spans_runs():
    spans = [Span(0, "a", "generate", 0, 6, 5), Span(0, "b", "generate", 4, 8, 5), Span(1, "c", "fetch", 1, 2, 5)]
    spans += [Span(0, "d", "prefill", 5, 5.5, 5), Span(0, "e", "generate", 6, 7, 5)]  # within the others
    moments = (Moment(0, 1, 0, 0, 2), Moment(8, 0, 0, 0, 1))
    one = summary(run_of([ended(0, 10.0)], spans=tuple(spans), moments=moments))
    assert one["replica_s"] == 2 * 8 + 1 * 2
    assert one["returned_replica_s"] == 1 * 2, "one of two was not there at the end"
    assert one["idle_share"] == 0.5
    assert summary(run_of([ended(0, 10.0)], moments=moments))["idle_share"] is None


def test_a_run_of_nothing_divides_by_nothing():
    one = summary(run_of([]))
    assert one["tokens_per_s"] is one["acceptance_length"] is one["mean_sample_s"] is one["bound_share"] is None
    assert one["tail_s"] == 0


def test_acceptance_and_bounds():
    one = summary(make_run("longest", drafts=1.5))
    assert one["acceptance_length"] == 1.5
    assert one["accepted"] < one["drafted"]
    assert one["bound_share"] == pytest.approx(one["bounds"]["best_s"] / one["makespan_s"], rel=1e-5)
    assert 0 < one["bound_share"] <= 1


def test_work_and_longest_are_reported_beside_the_bound():
    one = summary(make_run("longest", drafts=1.5))
    assert one["reachable_s"] == pytest.approx(one["bounds"]["work_s"] + one["bounds"]["longest_s"], rel=1e-5)
    assert one["reachable_share"] == pytest.approx(one["reachable_s"] / one["makespan_s"], rel=1e-5)
    assert one["reachable_share"] > one["bound_share"]
    assert "of work + longest" in rows(compare(systems(), "static"))[0]
    compared = compare(systems(), "static")
    assert account_rows(compared)[1][-1] == number(compared["mean"]["static"]["reachable_s"])


def test_a_share_of_the_clairvoyant_is_of_the_same_seed_and_only_where_it_runs():
    assert "clairvoyant_share" not in compare(systems(), "static")
    assert "of clairvoyant" not in rows(compare(systems(), "static"))[0]
    runs = systems() | {CLAIRVOYANT: [make_run("longest", seed, drafts=2.0) for seed in SEEDS]}
    compared = compare(runs, "static")
    each = [b.makespan_s / a.makespan_s for a, b in zip(runs["longest"], runs[CLAIRVOYANT], strict=True)]
    assert compared["clairvoyant_share"]["longest"][1:] == pytest.approx([min(each), max(each)], rel=1e-5)
    assert compared["clairvoyant_share"][CLAIRVOYANT] == [1.0, 1.0, 1.0]
    heads, *body = rows(compared)
    assert {len(row) for row in body} == {len(heads)}
    assert body[-1][heads.index("of clairvoyant")] == "100 %"
    assert "of what true lengths allow" in page("a page", {name: of[0] for name, of in runs.items()}, compared, [])


def test_ratios_are_taken_seed_by_seed():
    runs = systems()
    compared = compare(runs, "static")
    each = [b.makespan_s / a.makespan_s for a, b in zip(runs["longest"], runs["static"], strict=True)]
    mean, least, greatest = compared["throughput_ratio"]["longest"]
    assert (least, greatest) == (pytest.approx(min(each), rel=1e-5), pytest.approx(max(each), rel=1e-5))
    assert mean == pytest.approx(sum(each) / len(each), rel=1e-5)
    assert least < mean < greatest
    assert compared["throughput_ratio"]["static"] == compared["tail_ratio"]["static"] == [1.0, 1.0, 1.0]


def test_a_baseline_of_its_own_inverts_the_ratios():
    runs = {name: of_system[:1] for name, of_system in systems().items()}
    there, back = (compare(runs, name)["tail_ratio"][other][0] for name, other in (runs, list(runs)[::-1]))
    assert there * back == pytest.approx(1, rel=1e-5)


def test_a_tail_of_no_time_has_no_ratio():
    flat = run_of([ended(i, 5.0) for i in range(10)], system="flat")
    long = run_of([ended(i, 5.0) for i in range(9)] + [ended(9, 6.0)], system="long")
    compared = compare({"long": [long], "flat": [flat]}, "long")
    assert compared["tail_ratio"]["flat"] is None
    assert rows(compared)[2][2] == "–"


def test_the_same_runs_give_the_same_bytes():
    assert json.dumps(compare(systems(), "static")) == json.dumps(compare(systems(), "static"))
    reordered = compare(dict(reversed(systems().items())), "static")
    assert list(reordered["mean"]) == ["longest", "static"]  # as given, not sorted


@pytest.mark.parametrize(
    ("change", "baseline", "names"),
    [
        (lambda runs: runs, "verl", "verl"),
        (lambda runs: {**runs, "longest": runs["longest"][:2]}, "static", "longest"),
        (lambda runs: {**runs, "longest": [replace(r, workload="x") for r in runs["longest"]]}, "static", "longest"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, baseline, names):
    with pytest.raises(ValueError, match=names):
        compare(change(systems()), baseline)


def test_a_table_has_a_row_for_each_system():
    heads, *body = rows(compare(systems(), "static"))
    assert [row[0] for row in body] == ["static", "longest"]
    assert {len(row) for row in body} == {len(heads)}
    assert " to " in body[1][1] and " to " not in body[0][1]


# ---- the command ----------------------------------------------------------------------------------------


def written(path, systems_of_file: dict) -> str:
    path.write_text(json.dumps(ratios(systems_of_file, next(iter(systems_of_file)))))
    return str(path)


@pytest.fixture
def files(tmp_path):
    before = {name: [summary(run) for run in of_system] for name, of_system in systems().items()}
    after = {name: [{**one, "tokens_per_s": 2 * one["tokens_per_s"]} for one in old] for name, old in before.items()}
    return written(tmp_path / "a.json", {**before, "old": before["static"]}), written(tmp_path / "b.json", after)


def test_the_command_says_what_the_second_file_gains(files, capsys):
    command.main([*files, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["ratio"]["longest"]["tokens_per_s"] == [2.0, 2.0, 2.0]
    assert found["ratio"]["static"]["makespan_s"] == [1.0, 1.0, 1.0]
    assert found["ratio"]["static"]["moves"] is None  # none before: nothing to divide by
    assert (found["only_a"], found["only_b"]) == (["old"], [])


def test_the_command_prints_a_table(files, capsys):
    command.main(list(files), standalone_mode=False)
    said = capsys.readouterr().out
    assert "2.000" in said and "only in" in said and "moves" in said


@pytest.mark.parametrize(
    ("spoil", "key"),
    [
        (lambda report: report["systems"]["static"][0].pop("tail_s"), "systems.static.0.tail_s"),
        (lambda report: report["systems"]["longest"][1].update(makespan_s="fast"), "systems.longest.1.makespan_s"),
        (lambda report: report.pop("workload"), "workload"),
        (lambda report: report.update(workload="another"), "workload"),
        (lambda report: report.update(systems={}), "systems"),
        (lambda report: report.update(systems={"x": report["systems"]["static"]}), "systems"),
        (lambda report: [one.update(seed=9) for one in report["systems"]["static"]], "systems.static"),
    ],
)
def test_bad_input_is_one_line_with_file_and_key(files, tmp_path, spoil, key):
    report = json.loads((tmp_path / "b.json").read_text())
    spoil(report)
    (tmp_path / "b.json").write_text(json.dumps(report))
    with pytest.raises(BadInput) as refused:
        command.main(list(files), standalone_mode=False)
    assert "b.json: " + key in refused.value.message and "\n" not in refused.value.message
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(("content", "said"), [(b"{", "not JSON"), (b"\xff\xfe", "not JSON"), (None, "cannot be read")])
def test_a_file_that_is_no_report_is_refused(files, tmp_path, content, said):
    bad = tmp_path / "c.json"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(BadInput, match=said):
        command.main([files[0], str(bad)], standalone_mode=False)
