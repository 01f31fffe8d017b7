"""Metrics of a real service: Ray's page, which opens no port of ours; and every panel's query, in a real Prometheus."""

import asyncio
import time
from itertools import count
from math import isnan

import httpx
import psutil
import pytest
import ray
from gateway_service import caller, usual_policies
from listening_sockets import documented, listening, without_port
from prometheus import configuration, firing, names_of, panels, shown
from prometheus import running as prometheus
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.metrics.registry import COORDINATOR, GATEWAY, POOL_CAPACITY, REGISTRY, REPLICAS
from tailrace.policies.families.registry import Policies

LOAD_S = 60.0
WINDOW = "1m"
"""Of rates: 6 looks at the books."""


@pytest.fixture(scope="module")
def running(address):
    """The address of the gateway, and a client; many short chunks, so that samples move."""
    _, client = address
    client.set_policies_blocking(Policies(chunking={"type": "fixed", "chunk_tokens": 48}))
    yield address
    client.set_policies_blocking(usual_policies())


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


def _total(found: dict, name: str) -> float:
    return sum(one.value for one in found[name].samples)


def test_ray_s_page_has_every_series_and_opens_no_port_of_ours(running, before):
    url, client = running
    samples = load(client, url, 1.0)
    known = {f"ray_{name}" for metric in COORDINATOR + GATEWAY for name in names_of(metric)}
    until(lambda: set(page()) >= known and _total(page(), "ray_tailrace_samples_ended_total") >= samples)
    found = page()
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
    # The page itself, but perhaps not the agent's own port; the coordinator's for lines from gateways.
    more = {"dashboard agent": "dashboard agent" not in without_port(psutil.Process()), "coordinator": 1}
    for role, added in more.items():
        (numbers,) = sockets[role]
        assert (numbers.on_node, numbers.on_all) == (int(table[role][0]) + added, 0), f"{role}: {numbers}"
    assert sockets["gateway"] == {(3, 0)}, "Ray's, Serve's, and its own"


@pytest.mark.long
def test_every_panel_s_query_has_values_in_a_real_prometheus(running, tiny_model, tmp_path):
    url, client = running
    config = configuration([f"127.0.0.1:{page_port()}"], tmp_path, "2s")
    with prometheus(tmp_path, config) as address:
        assert load(client, url, LOAD_S / 2)
        version = client.status_blocking().weights_version + 1
        assert asyncio.run(client.update_weights(version, str(tiny_model))).version == version
        assert load(client, url, LOAD_S / 2)
        time.sleep(20.0)  # the last export, Ray's report of it, and a scrape
        found, alerts = panels(address, WINDOW), firing(address)
    print(shown(found))
    assert [key for key, values in found.items() if all(map(isnan, values.values()))] == []
    by_title = {title: values for (title, _), values in found.items()}
    assert sum(by_title["tailrace_tokens"].values()) > 0 and sum(by_title["tailrace_chunks"].values()) > 0
    assert 0 < by_title["Tail share"][""] < 1 and 0 < by_title["Replicas at work"][""] <= 1
    assert by_title["tailrace_weights_version"][""] == version
    assert set(by_title[POOL_CAPACITY.name]) == {"memory", "ssd"} and alerts == []
