"""Laws of the page: well-formed, self-contained, deterministic, small; ids are data; nothing that it draws is lost."""

import json
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser

import numpy as np
import pytest
from sim_runs import TOKENS_PER_S, make_run

from tailrace.lab.report.curves import acceptance, ended_share, last_of, over_moments
from tailrace.lab.report.simulation_page import page
from tailrace.lab.report.span_columns import TICKS, drawable, held_share, joined, timelines
from tailrace.lab.report.svg_charts import COLOURS, colours_of, thinned, ticks
from tailrace.lab.simulator.report import compare, number
from tailrace.lab.simulator.types import Moment, Span

VOID = {"meta", "input", "br", "link", "img"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'<!--\u2028"


class Reader(HTMLParser):
    """The tags, texts and attributes of a page; every tag must be closed, in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def runs_of(seed: int = 0) -> dict:
    made = {"verl": ("static", 1.0), "divided": ("longest", 1.0), "tailrace": ("longest", 1.8)}
    return {name: replace(make_run(kind, seed, drafts=d), system=name) for name, (kind, d) in made.items()}


def data_of(text: str) -> dict:
    return json.loads(re.search(r'id="spans">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(scope="module")
def made():
    seeds = [runs_of(seed) for seed in range(3)]
    comparison = compare({name: [runs[name] for runs in seeds] for name in seeds[0]}, "verl")
    return comparison, page("Rollouts", seeds[0], comparison, ["Lengths are made up."])


def test_it_is_well_formed_and_shows_every_system_and_figure(made):
    comparison, text = made
    said = " ".join(Reader(text).texts)
    for system, mean in comparison["mean"].items():
        assert system in said
        assert number(mean["makespan_s"]) in said and number(mean["tokens_per_s"]) in said
        assert f"{comparison['throughput_ratio'][system][0]:.2f} ×" in said
        assert f"{comparison['tail_ratio'][system][0]:.2f} ×" in said
    headings = ["Replicas", "Running batch", "KV in use", "Samples ended", "The tail", "Lengths", "Acceptance length"]
    assert [heading for heading in headings if heading not in said] == []
    assert "Lengths are made up." in said


def test_it_fetches_nothing(made):
    text = made[1].lower()
    for way in ("http:", "https:", "src=", "href=", "@import", "url(", "fetch(", "xmlhttp", "import(", "<link"):
        assert way not in text


def test_no_script_but_its_own_may_run(made):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', made[1])[1]
    script = re.search(r"<script>(.*?)</script>", made[1], re.DOTALL)[1]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy


def test_the_same_runs_give_the_same_page(made):
    assert page("Rollouts", runs_of(), None, []) == page("Rollouts", runs_of(), None, [])


def test_hostile_ids_and_names_are_inert():
    run = replace(make_run(samples=8, name=lambda index: f"{HOSTILE}{index}"), system=HOSTILE, workload=HOSTILE)
    run = replace(run, spans=(*run.spans, Span(0, HOSTILE, HOSTILE, 0, 1, 1)))
    text = page(HOSTILE, {HOSTILE: run}, None, [HOSTILE])
    read, plain = Reader(text), Reader(page("t", {"a": make_run(samples=8)}, None, ["n"]))
    assert set(read.tags) == set(plain.tags) and read.tags.count("script") == plain.tags.count("script") == 2
    assert not [name for name, _ in read.attributes if name.startswith("on") or name == "src"]
    assert HOSTILE + "0" in data_of(text)["samples"]
    assert not set("<>&") & set(re.search(r'id="spans">(.*?)</script>', text, re.DOTALL)[1])


def test_a_single_run_and_one_without_spans_or_drafts_have_a_page():
    run = make_run()
    text = page("One", {"static": replace(run, spans=())}, None, [])
    Reader(text)
    assert "No spans were recorded" in text and "Acceptance length" not in text and "canvas id" not in text


def test_what_is_no_workload_of_its_own_is_refused():
    with pytest.raises(ValueError, match="one workload"):
        page("t", {"a": make_run(), "b": replace(make_run(), workload="x")}, None, [])
    with pytest.raises(ValueError, match="at least one"):
        page("t", {}, None, [])


# ---- what is drawn --------------------------------------------------------------------------------------


def column(run: dict, name: str, kind: str) -> np.ndarray:
    return np.frombuffer(b64decode(run[name]), dtype=kind)


def test_spans_come_through_the_data_block(made):
    data = data_of(made[1])
    for packed, run in zip(data["runs"], runs_of().values(), strict=True):
        rows = np.repeat(packed["replicas"], np.diff(packed["offsets"]))
        names = [data["samples"][index] for index in column(packed, "sample", "<u4")]
        roles = [data["roles"][index] for index in column(packed, "role", "<u1")]
        found = sorted(zip(rows.tolist(), names, roles, column(packed, "tokens", "<u4").tolist(), strict=True))
        assert found == sorted((s.replica, s.sample_id, s.role, s.tokens) for s in run.spans)
        begin_s = np.sort(column(packed, "begin", "<u2") * data["horizon_s"] / data["ticks"])
        exact_s = np.sort([span.begin_s for span in run.spans])
        assert np.abs(begin_s - exact_s).max() <= data["horizon_s"] / TICKS
    last = max(runs_of()["verl"].ended, key=lambda sample: sample.ended_s)
    assert data["samples"][data["marked"]] == last.sample_id


def test_a_page_with_too_many_spans_joins_those_that_touch_and_keeps_the_longest():
    run = make_run(samples=200, chunk=50)
    whole = joined(run.spans, 1e-9)
    assert sum(span.tokens for span in whole) == sum(span.tokens for span in run.spans)
    assert len(whole) < len(run.spans)
    assert drawable({"a": run}, len(run.spans))["a"] == sorted(run.spans, key=lambda s: (s.replica, s.begin_s, s.end_s))
    kept = drawable({"a": run}, 40)["a"]
    least = min(span.end_s - span.begin_s for span in kept)
    left_out = sorted((span.end_s - span.begin_s for span in whole), reverse=True)[40:]
    assert len(kept) == 40 and max(left_out) <= least + 1e-6
    assert 0.4 < held_share(kept, run.spans) < 1
    assert timelines({"a": run}, {"a": kept})["runs"][0]["offsets"][-1] == 40


def test_joining_does_not_bridge_a_break_a_move_or_another_role():
    spans = [
        Span(0, "a", "generate", 0, 1, 5), Span(0, "a", "generate", 1, 2, 5), Span(0, "a", "generate", 3, 4, 5),
        Span(1, "a", "generate", 2, 3, 5), Span(0, "b", "prefill", 0, 1, 5), Span(0, "b", "generate", 1, 2, 5),
    ]  # fmt: skip
    assert sorted((s.replica, s.sample_id, s.begin_s, s.end_s, s.tokens) for s in joined(spans, 0.01)) == [
        (0, "a", 0, 2, 10), (0, "a", 3, 4, 5), (0, "b", 0, 1, 5), (0, "b", 1, 2, 5), (1, "a", 2, 3, 5),
    ]  # fmt: skip


def test_a_move_is_no_touch():
    spans = [Span(0, "a", "generate", 0, 1, 5), Span(1, "a", "generate", 1, 2, 5)]
    assert joined(spans, 0.01) == spans


def test_a_big_page_stays_small():
    run = make_run("longest", samples=4096, replicas=128, lanes=16, chunk=150)
    text = page("Big", {name: replace(run, system=name) for name in ("a", "b")}, None, [])
    assert len(run.spans) > 10_000 and len(text.encode()) < 1_000_000


def test_thinning_keeps_ends_and_peaks():
    points = [(float(x), float((x * 7919 + 500) % 1000)) for x in range(5000)]
    points[2345] = (2345.0, 5000.0)
    kept = thinned(points, 5000.0, bins=50)
    assert len(kept) <= 200 and kept == sorted(kept) and set(kept) <= set(points)
    assert kept[0] == points[0] and kept[-1] == points[-1] and (2345.0, 5000.0) in kept


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7.3), (0.9, 1), (0, 65_536), (0, 0.004), (3, 3)])
def test_ticks_are_round_few_and_within(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 7
    assert all(low - 1e-9 <= value <= high * (1 + 1e-9) for value in found)
    assert all(len(f"{value:.6g}".replace(".", "").strip("0")) <= 5 for value in found)


def test_colours_go_by_place_and_differ():
    names = [f"system {index}" for index in range(2 * COLOURS)]
    colours = colours_of([*names, *names[:3]])
    assert len(set(colours.values())) == len(names) and list(colours) == names


# ---- curves ---------------------------------------------------------------------------------------------


def test_of_moments_at_one_instant_the_last_counts():
    moments = tuple(Moment(at_s, running, 0, 0, 1) for at_s, running in ((0, 1), (0, 4), (2, 3), (2, 4), (5, 0)))
    points = over_moments(replace(make_run(), moments=moments, makespan_s=6.0), "running")
    assert points == [(0, 4), (2, 4), (5, 0), (6.0, 0)]


def test_the_share_ended_grows_from_nothing_to_all_and_its_tail_begins_where_it_crosses():
    run = make_run(samples=50)
    points = ended_share(run.ended)
    assert points == sorted(points) and points[0] == (0.0, 0.0) and points[-1] == (run.makespan_s, 1.0)
    tail = last_of(points, 0.9)
    assert tail[0][1] == 0.9 and tail[-1] == points[-1]
    assert all(share >= 0.9 for _, share in tail)


def test_acceptance_over_time_is_tokens_over_verifications():
    spans = [
        Span(0, "a", "generate", 0, 10, 40, 10), Span(1, "b", "generate", 0, 5, 5, 5), Span(0, "c", "fetch", 0, 9, 9),
    ]  # fmt: skip
    assert acceptance(spans, 10.0, looks=2) == [(2.5, pytest.approx(25 / 10)), (7.5, pytest.approx(20 / 5))]
    assert acceptance(spans[2:], 10.0) == []
    run = make_run("longest", drafts=1.8)
    assert {round(value, 6) for _, value in acceptance(run.spans, run.makespan_s)} == {1.8}
    assert sum(span.tokens for span in run.spans) == pytest.approx(
        sum((span.end_s - span.begin_s) * 1.8 * TOKENS_PER_S for span in run.spans)
    )
