"""The collector of the whole service's metrics, for prometheus_client: a snapshot, the counts of ends, and the engines'
own sums. A reading takes some ms with thousands of replicas.

Invariant: reading changes nothing except the seconds of replicas, which count from reading to reading.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from tailrace.deployments.feed.survey import Survey
from tailrace.deployments.messages.status import BatchStatus, PoolView, ReplicaStatus, ServiceSnapshot
from tailrace.deployments.metrics import registry as of
from tailrace.deployments.metrics.engine_sums import PREEMPTIONS, EngineSums
from tailrace.deployments.metrics.metric import Metric, Rows
from tailrace.deployments.metrics.totals import EndTotals

FAULT_OF_PLACE = {"turn": "core_restarted", "submit": "core_restarted", "drivers": "drivers_silent"} | {
    place: place for place in ("token_log", "pool")
}
"""Kinds of faults by the place of a contained error; all others are `contained`."""

POOL_TOKENS = {"local_tokens": "local", "pool_tokens": "pool", "recomputed_tokens": "recomputed"}


class ServiceCollector(Collector):
    """`totals`: counts of all ends. `snapshot`: takes one, with a survey."""

    def __init__(self, totals: EndTotals, snapshot: Callable[[Survey], ServiceSnapshot]):
        self._totals, self._snapshot, self._survey = totals, snapshot, Survey(count=0, part=0)
        self._engines = EngineSums()
        self._replica_s: Counter[str] = Counter()
        self._read_s = 0.0

    def collect(self) -> Iterator[Family]:
        """Yields the families in the order of the registry; those of a pool only with one."""
        snapshot = self._snapshot(self._survey)
        self._totals.settle()
        self._engines.learn(snapshot.replicas)
        states = Counter(map(state_of, snapshot.replicas))
        self._count_seconds(states, snapshot.coordinator_s)
        rows = service_rows(snapshot, states) | end_rows(self._totals) | engine_rows(self._engines)
        rows[of.REPLICA_SECONDS] = of.REPLICA_SECONDS.counted(self._replica_s)
        rows[of.FAULTS_SEEN] = of.FAULTS_SEEN.counted(self._totals.faults + faults(snapshot.contained))
        if snapshot.pool is not None:
            rows |= pool_rows(snapshot.pool)
        yield from (metric.family(rows[metric]) for metric in of.COORDINATOR if metric in rows)

    def _count_seconds(self, states: Mapping[str, int], now_s: float) -> None:
        passed_s, self._read_s = now_s - self._read_s, now_s
        for state, count in states.items():
            self._replica_s[state] += count * passed_s


def state_of(replica: ReplicaStatus) -> str:
    """Returns one of the states of `tailrace_replicas`."""
    if replica.closing:
        return "closing"
    if replica.aside:
        return "aside"
    if replica.running:
        return "busy"
    return "idle" if replica.ready else "other_weights"


def service_rows(snapshot: ServiceSnapshot, states: Mapping[str, int]) -> dict[Metric, Rows]:
    """Returns the rows of the present state. `states`: number of replicas by state."""
    replicas, batches = len(snapshot.replicas), snapshot.batches
    counts = {"waiting": snapshot.waiting, "running": snapshot.running, "held": snapshot.held}
    signs: Counter[str] = Counter()
    for priority, count in snapshot.queued.items():
        signs["normal" if not priority else "high" if priority > 0 else "low"] += count
    return {
        of.SAMPLES: of.SAMPLES.counted(counts),
        of.QUEUE: of.QUEUE.counted(signs),
        of.BATCHES: of.BATCHES.counted(Counter(map(part_of, batches))),
        of.BATCH_QUIET: {(): max((one.quiet_s for one in batches if not one.session), default=0.0)},
        of.BLOCKED: {(): int(bool(batches) and not (states["busy"] or states["idle"]))},
        of.HELD_BYTES: {(): sum(snapshot.held_bytes.values())},
        of.REPLICAS: of.REPLICAS.counted(states),
        of.REPLICAS_WANTED: {(): replicas if snapshot.wanted is None else snapshot.wanted},
        of.WEIGHTS_VERSION: {(): snapshot.weights_version},
        of.COORDINATOR_SECONDS: {(): snapshot.coordinator_s},
    }


def part_of(batch: BatchStatus) -> str:
    return "session" if batch.session else "tail" if batch.tail else "body"


def end_rows(totals: EndTotals) -> dict[Metric, Rows]:
    return {
        of.SAMPLES_ENDED: of.SAMPLES_ENDED.counted(totals.samples),
        of.BATCH_SECONDS: of.BATCH_SECONDS.counted(totals.batch_s),
        of.TOKENS: {(): totals.tokens},
        of.TOKEN_UPDATES: {(): totals.updates},
        of.CHUNKS: of.CHUNKS.counted(totals.chunks),
        of.CHUNK_SECONDS: {(phase,): seconds for phase, seconds in totals.chunk_s.items()},
        of.MOVES: of.MOVES.counted(totals.moves),
    }


def engine_rows(engines: EngineSums) -> dict[Metric, Rows]:
    work = engines.work
    return {
        of.ENGINE_TOKENS: {(): work["tokens"]},
        of.VERIFICATIONS: {(): work["verifications"]},
        of.DRAFT_TOKENS: {
            (source, outcome): work[f"{outcome}.{source}"]
            for source in of.DRAFT_TOKENS.labels["source"]
            for outcome in of.DRAFT_TOKENS.labels["outcome"]
        },
        of.PREEMPTIONS: {(): work[PREEMPTIONS]},
        of.STEP_SECONDS: {(): engines.steps},
        of.STEPS_AHEAD: {(): work["steps_ahead"]},
        of.WEIGHTS_SECONDS: {(): engines.weights_s},
    }


def pool_rows(pool: PoolView) -> dict[Metric, Rows]:
    tokens: Counter[tuple[str, ...]] = Counter(dict.fromkeys(((kind, "none") for kind in ("local", "pool")), 0))
    failures: Counter[str] = Counter()
    for name, count in pool.counts.items():
        event, _, cause = name.partition(".")
        if event in POOL_TOKENS:
            tokens[of.CONTEXT_TOKENS.row(POOL_TOKENS[event], cause or "none")] += count
        elif event.endswith("_failed"):
            failures[event.removesuffix("_failed")] += count
    status, ways = pool.status, {"load": "loaded_bytes", "save": "saved_bytes"}
    found: dict[Metric, Rows] = {
        of.CONTEXT_TOKENS: tokens,
        of.POOL_BYTES: {(way,): pool.counts.get(name, 0) for way, name in ways.items()},
        of.POOL_FAILURES: of.POOL_FAILURES.counted(failures),
        of.POOL_UP: {(): int(status is not None)},
    }
    if status is not None:
        found[of.POOL_USED] = {("memory",): status["dram_bytes"], ("ssd",): status["ssd_bytes"]}
        found[of.POOL_CAPACITY] = {("memory",): status["dram_capacity_bytes"], ("ssd",): status["ssd_capacity_bytes"]}
    return found


def faults(contained: Mapping[str, int]) -> Counter[str]:
    """Returns the number of faults by kind. `contained`: contained errors by PLACE.KIND."""
    found: Counter[str] = Counter()
    for name, count in contained.items():
        found[FAULT_OF_PLACE.get(name.partition(".")[0], "contained")] += count
    return found
