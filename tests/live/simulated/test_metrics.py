"""The board over a simulated service in virtual time: a real Prometheus asks each panel's query at the end of the run.

No Ray is started. The simulated engines do not draft, so panels of drafts are for the live test.
"""

import asyncio
import time
from math import isnan

import pytest
from prometheus import panels, program, running, shown, write_history
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from virtual_cluster import play

from tailrace.app.gateway.metrics import GatewayMetrics
from tailrace.deployments.messages.delivery import WINDOW_BYTES
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch

EVERY_S = 10.0
WITHOUT_DRAFTS = {"Accepted drafts"}


def recorded(tmp_path, pages: int) -> list[tuple[float, str]]:
    """Pages of a run with two replicas, batches of three priorities, a lost replica and a load of weights."""
    found, http = [], GatewayMetrics()

    async def driven(client) -> None:
        for number in range(10_000):
            groups = tuple(
                PromptGroup(prompt_id=f"p{index}", token_ids=(5, 6, 7 + index), samples=4, max_tokens=200)
                for index in range(4)
            )
            message = RolloutBatch(batch_id=f"b{number}", groups=groups, step=number, priority=number % 3 - 1)
            async for _ in client.rollout(message):
                pass

    async def story(cluster, client) -> None:
        drivers = [asyncio.ensure_future(driven(client))]
        for number in range(pages):
            await asyncio.sleep(EVERY_S)
            http.begin()
            http.end("/v1/completions", 200 if number % 2 else 429, 0.2)
            if number == pages // 2:
                cluster.kill(next(iter(cluster.replicas)))
                cluster.boot()
            text = generate_latest(cluster.coordinator.rollouts.metrics) + http.page()
            found.append((number * EVERY_S, text.decode()))
        for driver in drivers:
            driver.cancel()

    chunks = {"policies": {"chunking": {"type": "fixed", "chunk_tokens": 32}}}
    play(story, tmp_path, mean_tokens=200, pooled=True, window_bytes=WINDOW_BYTES, **chunks)
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("run"), 40)


def values(page: str, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(value for _, value in sorted(one.labels.items())): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
        if one.name == name
    }


def test_counters_never_fall_and_add_up(pages):
    ends, seconds = [], []
    for _, page in pages:
        ends.append(sum(values(page, "tailrace_samples_ended_total").values()))
        seconds.append(sum(values(page, "tailrace_replica_seconds_total").values()))
    assert ends == sorted(ends) and ends[-1] > 100
    last, before = pages[-1][1], pages[-2][1]
    assert seconds[-1] - seconds[-2] == pytest.approx(2 * EVERY_S), "two replicas"
    tokens = values(last, "tailrace_tokens_total")[()]
    made = values(last, "tailrace_engine_tokens_total")[()]
    assert values(before, "tailrace_tokens_total")[()] < tokens and made > 0.9 * tokens
    chunks = values(last, "tailrace_chunks_total")
    counts = values(last, "tailrace_chunk_seconds_count")
    assert set(counts.values()) == {sum(count for (end,), count in chunks.items() if end not in ("failed", "lost"))}
    assert values(last, "tailrace_faults_total")["replica_lost",] == 1
    assert values(last, "tailrace_moves_total")["recomputed",] >= 1


def test_every_panel_s_query_has_values_in_a_real_prometheus(pages, tmp_path):
    program("prometheus")
    began_s = time.time() - 3 * 3600
    write_history(tmp_path, [(began_s + at_s, page) for at_s, page in pages])
    with running(tmp_path, {"global": {}}) as url:
        found = panels(url, "1m", began_s + pages[-1][0])
    print(shown(found))
    numbers = {key: [one for one in some.values() if not isnan(one)] for key, some in found.items()}
    empty = {title for (title, _), some in numbers.items() if not some}
    assert empty - WITHOUT_DRAFTS == {"tailrace_weights_seconds"}, "no weights were loaded"
    by_title = {title: some for (title, _), some in found.items()}
    assert 0 < by_title["Tail share"][""] < 1 and by_title["Replicas at work"][""] > 0.5
    assert sum(by_title["tailrace_replicas"].values()) == 2
