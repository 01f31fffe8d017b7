"""The folder `monitoring`: the board is the registry's, and alerts name known series, are explained and are tried."""

import re
import subprocess

import pytest
import yaml
from prometheus import BOARD, FOLDER, ROOT, names_of, program

from tailrace.deployments.metrics.registry import REGISTRY

QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
ALERTS = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
KNOWN = {name for metric in REGISTRY for name in names_of(metric)}
NAME, LABEL = re.compile(r"\btailrace_\w+"), re.compile(r"(tailrace_\w+)\{([^}]*)\}")


@pytest.fixture
def made(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import monitoring

    return monitoring


def test_the_board_and_the_table_are_those_of_the_registry(made):
    assert made.BOARD.read_text() == made.board(), "run scripts/monitoring.py"
    assert made.rendered(made.PAGE.read_text()) == made.PAGE.read_text(), "run scripts/monitoring.py"


def test_every_metric_is_on_the_board_and_in_the_table_and_nothing_else_is(made):
    named = {name for query in QUERIES for name in NAME.findall(query)}
    assert named <= KNOWN
    for metric in REGISTRY:
        assert named & names_of(metric), metric.name
        assert f"| `{metric.series}` |" in made.PAGE.read_text()


def test_panels_do_not_overlap_and_ids_are_unique():
    taken = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells and at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_counters_are_read_as_rates_and_gauges_are_not():
    for query in QUERIES:
        for metric in REGISTRY:
            for name in names_of(metric):
                for before in re.findall(rf"(\w*)\(?{name}\b", query):
                    assert (before == "rate") == (metric.kind != "gauge"), query


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_names_known_series_and_labels_and_is_explained(alert):
    assert set(NAME.findall(alert["expr"])) <= KNOWN
    by_series = {name: metric for metric in REGISTRY for name in names_of(metric)}
    for name, labels in LABEL.findall(alert["expr"]):
        for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
            assert value in by_series[name].labels[label]
    assert f"| `{alert['alert']}` |" in (ROOT / "docs" / "operations.md").read_text()
    assert alert["annotations"]["summary"] and alert["labels"]["severity"] in ("warning", "critical")


def test_each_alert_is_tried_in_a_case_that_raises_it_and_in_one_that_does_not():
    cases = [
        one
        for test in yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
        for one in test["alert_rule_test"]
    ]
    names = {alert["alert"] for alert in ALERTS}
    assert {one["alertname"] for one in cases if one.get("exp_alerts")} == names
    assert {one["alertname"] for one in cases if not one.get("exp_alerts")} == names


def test_ray_s_names_become_ours_and_no_other_page_s_series_stay():
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    keep, rename, _ = job["metric_relabel_configs"]
    for name in KNOWN:
        assert re.fullmatch(keep["regex"], f"ray_{name}") and re.fullmatch(rename["regex"], f"ray_{name}")[1] == name
    assert not re.fullmatch(keep["regex"], "ray_node_cpu_utilization")


@pytest.mark.parametrize(
    "words",
    [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml"), ("check", "config", "prometheus.yml")],
)
def test_promtool_takes_them(words):
    done = subprocess.run((program("promtool"), *words), cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
