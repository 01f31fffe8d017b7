"""Metrics: distributions, labels, sums over replicas that come and go, the collector, and the exporters."""

import asyncio
import http.server
import logging
from collections import Counter
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_rollout_cases import finish, join, submit, tick

from tailrace.deployments.batches.deliveries import Delivery
from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.snapshot import replica_statuses
from tailrace.deployments.messages.chunk import STEP_BOUNDS_S, ChunkResult, EngineStats
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.messages.status import PoolView, ReplicaStatus, ServiceSnapshot
from tailrace.deployments.metrics import registry as of
from tailrace.deployments.metrics.collector import ServiceCollector
from tailrace.deployments.metrics.engine_sums import EngineSums
from tailrace.deployments.metrics.export import MetricsExport
from tailrace.deployments.metrics.metric import OTHER, Distribution, Metric
from tailrace.deployments.metrics.otlp_exporter import OtlpExporter
from tailrace.deployments.metrics.totals import EndTotals
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import EndSample, SampleEnd, StartChunk
from tailrace.policies.protocol.events import ChunkEnd


def stats(name: str, steps: int = 0, **others) -> EngineStats:
    counts = [0] * (len(STEP_BOUNDS_S) + 1)
    counts[4] = steps
    work = {"steps": steps, "step_us": steps * 30_000, "tokens": 2 * steps, "drafted.own": steps, "accepted.own": 1}
    made = EngineStats(
        replica_id=name, weights_version=0, block_tokens=16, kv_capacity_blocks=8, max_running=4, max_model_len=512,
        draft_tokens=0, observed_at=0.0, step_counts=tuple(counts), work=work,
    )  # fmt: skip
    return replace(made, **others)


def status(name: str, steps: int = 0, **others) -> ReplicaStatus:
    """A replica by its report alone."""
    report = stats(name, steps)
    usual = {"ready": True, "running": 0, "max_running": 4, "kv_used_share": 0.0, "weights_version": 0}
    said = {"work": report.work, "step_counts": report.step_counts, "observed_s": 0.0}
    return ReplicaStatus(replica_id=name, **usual | said | others)


def batch(samples: int = 10, priority: int = 0) -> LiveBatch:
    group = PromptGroup(prompt_id="p", token_ids=(1, 2, 3), samples=samples, max_tokens=8)
    message = RolloutBatch(batch_id="b", groups=(group,), priority=priority)
    prepared = [Prepared(group, (1, 2, 3), 8, "key")]
    return LiveBatch(message, "b", Delivery(message, "d", 0.0), prepared, {}, submitted_s=10.0)


def result(end: ChunkEnd = ChunkEnd.LENGTH, tokens: int = 2, **others) -> ChunkResult:
    made = ChunkResult(
        chunk_id="c", token_ids=np.arange(tokens, dtype=np.int32), logprobs=np.zeros(tokens, np.float32),
        raw_logprobs=np.zeros(tokens, np.float32), end=end, weights_version=0, queue_s=0.05, prefill_s=0.7,
        decode_s=1000.0, cached_tokens=0, computed_tokens=3,
    )  # fmt: skip
    return replace(made, **others)


# ---- metrics ----------------------------------------------------------------------------------------


def test_a_name_is_taken_once_and_says_its_unit():
    names = [metric.name for metric in of.REGISTRY]
    assert len(set(names)) == len(names)
    for metric in of.REGISTRY:
        assert metric.name.startswith("tailrace_") and metric.help
        assert (metric.unit == "s") == metric.name.endswith("_seconds")
        assert (metric.unit == "By") == metric.name.endswith("_bytes")
        assert (metric.kind == "histogram") == bool(metric.bounds)
        assert metric.bounds == tuple(sorted(metric.bounds))


def test_a_label_that_the_registry_does_not_know_makes_no_series():
    assert of.CONTEXT_TOKENS.row("local", "none") == ("local", "none")
    assert of.CONTEXT_TOKENS.row("recomputed", "a new cause") == ("recomputed", OTHER)


def test_labels_of_the_whole_service_are_few():
    series = Counter()
    for metric in of.COORDINATOR:
        assert all(metric.labels.values()), "each names its values"
        rows = 1
        for values in metric.labels.values():
            rows *= len(values)
        series[metric.name] = rows * (len(metric.bounds) + 3 if metric.bounds else 1)
    assert series.total() < 300, "however many replicas there are"


def test_a_value_is_in_the_bucket_whose_bound_it_does_not_exceed():
    found = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.1, 9.0):
        found.add(value)
    assert found.counts == [2, 2, 2] and found.count == 6 and found.sum == pytest.approx(16.1)
    at_once = Distribution((1.0, 2.0))
    at_once.add_all((0.5, 1.0, 1.5, 2.0, 2.1, 9.0))
    assert at_once.counts == found.counts and at_once.sum == pytest.approx(found.sum)
    assert list(found.cumulated()) == [("1.0", 2), ("2.0", 4), ("+Inf", 6)]


# ---- sums over replicas -------------------------------------------------------------------------------


def test_sums_only_grow_while_replicas_come_go_and_come_back():
    sums, seen = EngineSums(), []
    for replicas in (
        [status("a", 5), status("b", 3)],
        [status("a", 7)],
        [status("a", 7), status("c", 1), status("d", 9, observed_s=None)],
        [status("a", 8), status("b", 4), status("c", 1)],
        [status("c", observed_s=None, work={}, step_counts=())],
    ):
        sums.learn(replicas)
        seen.append((sums.work["steps"], sums.work["tokens"], sums.steps.count, sums.work["accepted.own"]))
    assert seen == [(8, 16, 8, 2), (10, 20, 10, 2), (11, 22, 11, 3), (13, 26, 13, 3), (13, 26, 13, 3)]
    assert sums.steps.counts[4] == 13 and sums.steps.sum == pytest.approx(0.39)


def test_replicas_that_are_gone_are_remembered_up_to_a_bound():
    sums = EngineSums()
    for number in range(200):
        sums.learn([status(f"r{number}", 1)])
    assert sums.work["steps"] == 200 and len(sums._last) < 70


def test_a_load_of_weights_counts_once():
    sums = EngineSums()
    for pause_s in (0.0, 1.5, 1.5, 0.3):
        sums.learn([status("a", weights_pause_s=pause_s)])
    sums.learn([status("a", weights_pause_s=0.3, weights_version=-1)])
    assert sums.weights_s.count == 2 and sums.weights_s.sum == pytest.approx(1.8)


# ---- ends -----------------------------------------------------------------------------------------------


def test_the_tail_is_the_time_of_the_last_tenth():
    now_s = 10.0
    totals, of_batch = EndTotals(), batch(samples=10)
    for number in range(10):
        now_s += 1.0 if number < 9 else 4.0
        of_batch.end(EndSample(f"b/p#{number}", SampleEnd.STOP, None, "test"), now_s)
        totals.sample_ended(SampleEnd.STOP)
        assert of_batch.is_in_tail == (number >= 8)
    totals.batch_over(of_batch.parts_s(now_s))
    assert totals.batch_s == {"body": 9.0, "tail": 4.0} and totals.samples["stop"] == 10


def test_a_chunk_that_is_written_elsewhere_is_a_move_by_the_way_of_its_kv():
    totals, of_batch = EndTotals(), batch(1)
    sample = of_batch.samples["b/p#0"]

    def write(start, replica, one):
        totals.wrote(one, sample.append(start, one, replica, "digest"))

    for start, (replica, pulled) in enumerate((("a", 0), ("a", 5), ("b", 5), ("a", 0), ("a", 0))):
        write(start, replica, result(tokens=1, pulled_tokens=pulled))
    assert totals.moves == {"pulled": 1, "recomputed": 1} and totals.tokens == 5 == sample.tokens
    with pytest.raises(ValueError, match="begins at 9"):
        write(9, "a", result())
    assert totals.tokens == 5


# ---- the collector ---------------------------------------------------------------------------------------


def rows(families) -> dict[str, dict[tuple[str, ...], float]]:
    """Values of families by name and labels; those of a histogram are left out."""
    return {
        one.name: {tuple(sample.labels.values()): sample.value for sample in one.samples}
        for one in families
        if one.type != "histogram"
    }


class Shell:
    """A core, and a collector that reads it."""

    def __init__(self, **others):
        self.core, self.now, self.others = RolloutCore(Policies()), [0.0], others
        self.totals, self.registry = EndTotals(), ReplicaRegistry()
        self.collector = ServiceCollector(self.totals, self.snapshot)

    def snapshot(self, survey) -> ServiceSnapshot:
        counts = self.core.counts()
        parts = {
            "coordinator_s": self.now[0], "queued": self.core.queued(), "batches": (), "observed_s": 0.0,
            "replicas": replica_statuses(self.core, self.registry, self.now[0]), "waits_for": None, "policies": {},
        }  # fmt: skip
        return ServiceSnapshot(
            **{state: counts[state] for state in ("waiting", "running", "held")} | parts | self.others
        )

    def rows(self) -> dict[str, dict[tuple[str, ...], float]]:
        return rows(self.collector.collect())

    def row(self, metric: Metric) -> dict[tuple[str, ...], float]:
        return self.rows()[metric.name]


def test_samples_by_state_and_the_queue_by_priority():
    shell = Shell()
    shell.core.observe(join("r", 100, max_running=2))
    submit(shell.core, ev.GroupSpec("g", 10, 5, 20))
    shell.core.observe(ev.SamplesSubmitted(0.0, "urgent", (ev.GroupSpec("h", 10, 3, 20),), priority=7))
    started = [action for action in tick(shell.core) if isinstance(action, StartChunk)]
    figures = shell.rows()
    assert figures[of.SAMPLES.name] == {("waiting",): 6, ("running",): 2, ("held",): 0}
    assert sum(figures[of.QUEUE.name].values()) == 6 and figures[of.QUEUE.name]["low",] == 0
    assert figures[of.QUEUE.name]["high",] == 1 and figures[of.QUEUE.name]["normal",] == 5
    finish(shell.core, started[0])
    assert shell.row(of.SAMPLES)["running",] == 1


def test_replica_seconds_are_those_between_looks_by_the_present_state():
    shell = Shell()
    shell.rows()
    shell.core.observe(join("a", 100, max_running=2))
    shell.core.observe(join("b", 100, max_running=2))
    submit(shell.core, ev.GroupSpec("g", 10, 1, 20))
    tick(shell.core)
    shell.now[0] = 3.0
    figures = shell.rows()
    assert figures[of.REPLICAS.name] == {
        ("busy",): 1, ("idle",): 1, ("closing",): 0, ("aside",): 0, ("other_weights",): 0
    }  # fmt: skip
    shell.core.observe(ev.WeightsChanged(3.0, 1))
    shell.now[0] = 5.0
    seconds = shell.row(of.REPLICA_SECONDS)
    assert seconds["busy",] == 5.0 and seconds["idle",] == 3.0 and seconds["other_weights",] == 2.0


def test_a_batch_without_a_replica_is_blocked_and_grows_quiet():
    shell = Shell(batches=(batch().status(70.0, 0.0, 0),))
    shell.now[0] = 70.0
    figures = shell.rows()
    assert figures[of.BLOCKED.name] == {(): 1} and figures[of.BATCH_QUIET.name] == {(): 60.0}
    assert figures[of.BATCHES.name] == {("body",): 1, ("tail",): 0, ("session",): 0}
    shell.core.observe(join("a", 100))
    assert shell.row(of.BLOCKED) == {(): 0}


def test_a_pool_that_is_down_says_so_and_keeps_its_counts():
    counts = {
        "local_tokens": 5, "pool_tokens": 7, "recomputed_tokens.new": 11, "recomputed_tokens.odd": 1,
        "save_failed.full": 2, "save_failed.paused": 3, "loaded_bytes": 64, "load_ms.4": 9,
    }  # fmt: skip
    figures = Shell(pool=PoolView(status=None, token_bytes=1, counts=counts)).rows()
    assert figures[of.POOL_UP.name] == {(): 0} and of.POOL_USED.name not in figures
    assert figures[of.CONTEXT_TOKENS.name] == {
        ("local", "none"): 5, ("pool", "none"): 7, ("recomputed", "new"): 11, ("recomputed", OTHER): 1
    }  # fmt: skip
    assert figures[of.POOL_FAILURES.name]["save",] == 5 and figures[of.POOL_BYTES.name]["load",] == 64
    assert of.POOL_UP.name not in Shell().rows()


def test_contained_errors_are_faults_by_place():
    contained = {"turn.KeyError": 1, "drivers.silent": 2, "poll_pool.OSError": 3, "token_log.disk": 4}
    shell = Shell(contained=contained)
    shell.totals.chunk_failed(lost=True)
    faults = {kind: count for (kind,), count in shell.row(of.FAULTS_SEEN).items() if count}
    assert faults == {"core_restarted": 1, "drivers_silent": 2, "contained": 3, "token_log": 4, "chunk_lost": 1}


# ---- exporters -------------------------------------------------------------------------------------------


def full_shell() -> Shell:
    shell = Shell(pool=PoolView(status=None, token_bytes=1, counts={"pool_tokens": 3}))
    shell.core.observe(join("a", 100, max_running=2))
    shell.registry.reports["a"], shell.registry.observed_at["a"] = stats("a", 5), 0.0
    shell.totals.chunk_came(result())
    shell.totals.sample_ended(SampleEnd.STOP)
    return shell


def text_of(shell: Shell) -> str:
    registry = CollectorRegistry()
    registry.register(shell.collector)
    return generate_latest(registry).decode()


def test_the_page_is_prometheus_text_with_every_series():
    text = text_of(full_shell())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {metric.name for metric in of.COORDINATOR} - {of.POOL_USED.name, of.POOL_CAPACITY.name}
    for metric in of.COORDINATOR:
        if (family := families.get(metric.name)) is not None:
            assert family.type == metric.kind and family.documentation == metric.help
            assert {*family.samples[0].labels} - {"le"} == {*metric.labels}
    samples = {(one.name, one.labels.get("le"), one.labels.get("phase")): one.value
               for one in families["tailrace_chunk_seconds"].samples}  # fmt: skip
    assert samples["tailrace_chunk_seconds_bucket", "0.5", "prefill"] == 0.0
    assert samples["tailrace_chunk_seconds_bucket", "1.0", "prefill"] == 1.0
    assert samples["tailrace_chunk_seconds_bucket", "600.0", "decode"] == 0.0
    assert samples["tailrace_chunk_seconds_bucket", "+Inf", "decode"] == 1.0
    assert samples["tailrace_chunk_seconds_sum", None, "decode"] == 1000.0
    assert 'tailrace_samples_ended_total{end="stop"} 1.0' in text


def test_a_page_names_no_sample_and_no_batch():
    text = text_of(Shell(batches=(batch().status(1.0, 0.0, 0),)))
    assert "b/p" not in text and "batch_id" not in text


def test_a_constant_label_is_on_every_series():
    family = of.CHUNK_SECONDS.family({("queue",): Distribution((1.0,))}, {"replica": "x"})
    assert {tuple(one.labels)[:2] for one in family.samples} == {("replica", "phase")}


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes metrics by OTLP over HTTP."""

    requests: list[ExportMetricsServiceRequest]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_otlp_carries_counters_gauges_and_histograms():
    handler = type("Handler", (Collector,), {"requests": []})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    exporter = OTLPMetricExporter(endpoint=f"http://127.0.0.1:{server.server_port}/v1/metrics")
    OtlpExporter("tailrace-coordinator", exporter).export(families := list(full_shell().collector.collect()))
    server.shutdown()
    server.server_close()
    (resource,) = handler.requests[0].resource_metrics
    assert {"service.name": "tailrace-coordinator"}.items() <= {
        one.key: one.value.string_value for one in resource.resource.attributes
    }.items()
    found = {one.name: one for one in resource.scope_metrics[0].metrics}
    assert set(found) == {one.name for one in families}
    assert found["tailrace_tokens"].sum.is_monotonic and found["tailrace_step_seconds"].unit == "s"
    (steps,) = found["tailrace_step_seconds"].histogram.data_points
    assert tuple(steps.explicit_bounds) == STEP_BOUNDS_S and steps.count == 5 and steps.sum == pytest.approx(0.15)
    assert steps.bucket_counts[4] == 5 and sum(steps.bucket_counts) == 5
    phases = {one.attributes[0].value.string_value for one in found["tailrace_chunk_seconds"].histogram.data_points}
    assert phases == {"queue", "prefill", "decode"}
    states = {one.attributes[0].value.string_value: one.as_int for one in found["tailrace_replicas"].gauge.data_points}
    assert states["idle"] == 1


def test_an_exporter_that_fails_ends_neither_the_others_nor_the_loop(caplog):
    class Broken:
        def export(self, families):
            raise OSError("no collector")

    class Open(list):
        def export(self, families):
            self.append(families)

    reads = iter([["a"], None, ["b"]])

    def read():
        if (found := next(reads, [])) is None:
            raise KeyError("a defect")
        return found

    async def story():
        opened = Open()
        loop = asyncio.ensure_future(MetricsExport([Broken(), opened], read).run(every_s=0.0))
        while len(opened) < 5:
            await asyncio.sleep(0.001)
        loop.cancel()
        return opened

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(story())[:4] == [["a"]] * 2 + [["b"]] * 2
    assert sorted(record.args[0] for record in caplog.records) == ["Broken", "reading"], "each once"
