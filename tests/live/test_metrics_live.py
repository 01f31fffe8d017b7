"""Metrics of a real service: Ray's page, which opens no port of ours; and every panel's query, in a real Prometheus."""

import asyncio
import json
import os
import re
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from itertools import count
from math import isnan
from pathlib import Path

import httpx
import psutil
import pytest
import ray
import yaml
from gateway_service import caller, gateway
from prometheus_client.parser import text_string_to_metric_families
from test_monitoring import BOARD, FOLDER, program
from test_ports import documented, listening, open_sockets
from waiting import until

from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.metrics.registry import COORDINATOR, GATEWAY, POOL_CAPACITY, REGISTRY, REPLICAS
from tailrace.policies.families.registry import Policies

RAYS = {"RAY_enable_metrics_collection": "true", "RAY_metrics_report_interval_ms": "5000"}
LOAD_S = 60.0
WINDOW = "1m"
"""Of rates: 12 exports."""


@pytest.fixture(scope="module")
def before():
    return open_sockets()


@pytest.fixture(scope="module")
def running(tiny_model, tmp_path_factory, before):
    """The address of a gateway, and a client; Ray collects metrics."""
    ours = {name: os.environ.get(name) for name in RAYS}
    os.environ.update(RAYS)
    with gateway(tiny_model, tmp_path_factory.mktemp("metrics")) as found:
        asyncio.run(found[1].set_policies(Policies(chunking={"type": "fixed", "chunk_tokens": 48})))
        yield found
    for name, value in ours.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def page_port() -> int:
    (node,) = ray.nodes()
    return node["MetricsExportPort"]


async def roll(client, number: int) -> int:
    """One batch: many short chunks, so that samples move. Returns its samples."""
    groups = tuple(
        PromptGroup(prompt_id=f"p{number}-{index}", text="Count from one to ten. " * 8, samples=6, max_tokens=200)
        for index in range(4)
    )
    message = RolloutBatch(batch_id=f"b{number}", groups=groups, step=number, priority=number % 3 - 1)
    return sum([len(group.samples) async for group in client.rollout(message)])


def load(client, url: str, seconds: float) -> int:
    """Batches, requests and loads of weights for a while. Returns the samples of the batches."""
    until_s, samples, first = time.monotonic() + seconds, 0, int(time.time())
    with caller(url, "evaluator") as http:
        for number in count(first):
            samples += asyncio.run(roll(client, number))
            http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 8})
            assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
            if time.monotonic() > until_s:
                return samples
    raise AssertionError("a count never ends")


def page() -> dict:
    """Families of Ray's page by name."""
    text = httpx.get(f"http://127.0.0.1:{page_port()}/metrics", timeout=30).text
    return {one.name: one for one in text_string_to_metric_families(text) if one.name.startswith("ray_tailrace_")}


def test_ray_s_page_has_every_series_and_opens_no_port_of_ours(running, before):
    url, client = running
    samples = load(client, url, 1.0)
    ended = "ray_tailrace_samples_ended_total"
    until(lambda: ended in (found := page()) and sum(one.value for one in found[ended].samples) >= samples)
    found = page()
    known = {f"ray_{name}" for metric in COORDINATOR + GATEWAY for name, _ in metric.all_series()}
    assert set(found) == known, set(found) ^ known
    for family in found.values():
        assert {one.name for one in family.samples} == {family.name}, "Ray adds nothing to a gauge's name"
        assert not {"sample_id", "batch_id", "replica_id"} & {*family.samples[0].labels}
    states = {one.labels["state"]: one.value for one in found["ray_tailrace_replicas"].samples}
    assert set(states) == {*REPLICAS.labels["state"]} and sum(states.values()) == 2
    (buckets,) = [f"ray_{metric.name}_bucket" for metric in REGISTRY if metric.name == "tailrace_step_seconds"]
    counts = sorted((float(one.labels["le"]), one.value) for one in found[buckets].samples)
    assert [value for _, value in counts] == sorted(value for _, value in counts) and counts[-1][1] > 0

    sockets, table = listening(psutil.Process(), before), documented()
    for role in ("coordinator", "dashboard agent"):
        (numbers,) = sockets[role]
        more = role == "dashboard agent"  # the page itself
        assert (numbers.on_node, numbers.on_all) == (int(table[role][0]) + more, 0), f"{role}: {numbers}"


@contextmanager
def prometheus(folder: Path):
    """A Prometheus that reads Ray's page by our configuration; its address."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "2s"
    config["rule_files"] = [str(FOLDER / "alerts.yml")]
    (job,) = config["scrape_configs"]
    job["file_sd_configs"] = [{"files": [str(folder / "nodes.json")]}]
    (folder / "nodes.json").write_text(json.dumps([{"targets": [f"127.0.0.1:{page_port()}"]}]))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = ray._common.network_utils.find_free_port()
    words = ("--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.path=data")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen((program("prometheus"), *words), cwd=folder, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: answers(f"{url}/-/ready"))
            yield url
        finally:
            process.terminate()
            process.wait(30)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def asked(url: str, query: str) -> dict[str, float]:
    """Values of a query, now, by the labels of their series."""
    text = urllib.parse.urlencode({"query": query.replace("$__rate_interval", WINDOW)})
    answer = json.load(urllib.request.urlopen(f"{url}/api/v1/query?{text}", timeout=30))
    return {
        " ".join(value for _, value in sorted(one["metric"].items())): float(one["value"][1])
        for one in answer["data"]["result"]
    }


def test_every_panel_s_query_has_values_in_a_real_prometheus(running, tiny_model, tmp_path):
    url, client = running
    with prometheus(tmp_path) as address:
        assert load(client, url, LOAD_S / 2)
        version = client.status_blocking().weights_version + 1
        assert asyncio.run(client.update_weights(version, str(tiny_model))).version == version
        assert load(client, url, LOAD_S / 2)
        time.sleep(12.0)  # the last export, Ray's report of it, and a scrape
        shown = {
            (panel["title"], target["legendFormat"], target["expr"]): asked(address, target["expr"])
            for panel in BOARD["panels"]
            for target in panel.get("targets", ())
        }
        alerts = json.load(urllib.request.urlopen(f"{address}/api/v1/alerts", timeout=30))["data"]["alerts"]
    for (title, legend, _), values in shown.items():
        print(f"{title} | {legend} |", ", ".join(f"{name or 'all'}: {value:.4g}" for name, value in values.items()))
    numbers = {key: [value for value in values.values() if not isnan(value)] for key, values in shown.items()}
    assert [key for key, values in numbers.items() if not values] == []
    first = {title: values for (title, _, _), values in reversed(shown.items())}
    assert sum(first["tailrace_tokens"].values()) > 0 and sum(first["tailrace_chunks"].values()) > 0
    assert first["tailrace_step_seconds"] and 0 < first["Tail share"][""] < 1
    assert 0 < first["Replicas at work"][""] <= 1 and first["tailrace_weights_version"][""] == version
    assert {re.split(r"\s", name)[0] for name in first[POOL_CAPACITY.name]} == {"memory", "ssd"}
    assert [one["labels"]["alertname"] for one in alerts if one["state"] == "firing"] == []
