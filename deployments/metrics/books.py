"""Figures of the whole service, read from the coordinator's books: a reading takes some ms with thousands of replicas.

Invariant: reading changes nothing except the seconds of replicas, which count from reading to reading. Called by
`Rollouts`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.status import PoolView
from tailrace.deployments.metrics import registry as of
from tailrace.deployments.metrics.engine_sums import PREEMPTIONS, EngineSums
from tailrace.deployments.metrics.metric import Figures, Metric
from tailrace.deployments.metrics.totals import EndTotals
from tailrace.policies.core.replica_table import ReplicaTable

FAULT_OF_PLACE = {"turn": "core_restarted", "submit": "core_restarted", "drivers": "drivers_silent"} | {
    place: place for place in ("token_log", "pool")
}
"""Kinds of faults by the place of a contained error; all others are `contained`."""

POOL_TOKENS = {"local_tokens": "local", "pool_tokens": "pool", "recomputed_tokens": "recomputed"}

Row = dict[tuple[str, ...], float]


class BooksView(NamedTuple):
    """The books at one moment. `waiting`: queued samples by priority. `contained`: errors by PLACE.KIND."""

    now_s: float
    counts: Mapping[str, int]
    waiting: Mapping[int, int]
    batches: Collection[LiveBatch]
    table: ReplicaTable
    wanted: int | None
    reports: Mapping[str, EngineStats]
    pool: PoolView | None
    contained: Mapping[str, int]
    held_bytes: int
    weights_version: int


class Books:
    """`totals`: counts of all ends. `look`: returns the present books."""

    def __init__(self, totals: EndTotals, look: Callable[[], BooksView]):
        self._totals, self._look, self._engines = totals, look, EngineSums()
        self._replica_s: Counter[str] = Counter()
        self._looked_s = 0.0

    def figures(self) -> Figures:
        look = self._look()
        self._totals.settle()
        self._engines.learn(look.reports)
        found = self._of_samples(look) | self._of_chunks() | self._of_replicas(look) | _of_batches(look)
        if look.pool is not None:
            found |= _of_pool(look.pool)
        found[of.FAULTS_SEEN] = _counted(of.FAULTS_SEEN, self._totals.faults + _faults(look.contained))
        return {metric.name: rows for metric, rows in found.items()}

    def _of_samples(self, look: BooksView) -> dict[Metric, Row]:
        signs = Counter()
        for priority, count in look.waiting.items():
            signs["normal" if not priority else "high" if priority > 0 else "low"] += count
        return {
            of.SAMPLES: {(state,): look.counts[state] for state in of.SAMPLES.labels["state"]},
            of.SAMPLES_ENDED: _counted(of.SAMPLES_ENDED, self._totals.samples),
            of.QUEUE: _counted(of.QUEUE, signs),
            of.TOKENS: {(): self._totals.tokens},
            of.BATCH_SECONDS: _counted(of.BATCH_SECONDS, self._totals.batch_s),
            of.HELD_BYTES: {(): look.held_bytes},
            of.COORDINATOR_SECONDS: {(): look.now_s},
        }

    def _of_chunks(self) -> dict[Metric, Row]:
        totals, engines = self._totals, self._engines
        work = engines.work
        drafts = {
            (source, outcome): work[f"{outcome}.{source}"]
            for source in of.DRAFT_TOKENS.labels["source"]
            for outcome in of.DRAFT_TOKENS.labels["outcome"]
        }
        return {
            of.CHUNKS: _counted(of.CHUNKS, totals.chunks),
            of.CHUNK_SECONDS: {(phase,): seconds.copy() for phase, seconds in totals.chunk_s.items()},
            of.MOVES: _counted(of.MOVES, totals.moves),
            of.ENGINE_TOKENS: {(): work["tokens"]},
            of.VERIFICATIONS: {(): work["verifications"]},
            of.DRAFT_TOKENS: drafts,
            of.PREEMPTIONS: {(): work[PREEMPTIONS]},
            of.STEP_SECONDS: {(): engines.steps.copy()},
            of.WEIGHTS_SECONDS: {(): engines.weights_s.copy()},
        }

    def _of_replicas(self, look: BooksView) -> dict[Metric, Row]:
        states = look.table.states()
        passed_s, self._looked_s = look.now_s - self._looked_s, look.now_s
        for state, count in states.items():
            self._replica_s[state] += count * passed_s
        blocked = bool(look.batches) and not (states["busy"] or states["idle"])
        return {
            of.REPLICAS: _counted(of.REPLICAS, states),
            of.REPLICAS_WANTED: {(): states.total() if look.wanted is None else look.wanted},
            of.REPLICA_SECONDS: _counted(of.REPLICA_SECONDS, self._replica_s),
            of.BLOCKED: {(): int(blocked)},
            of.WEIGHTS_VERSION: {(): look.weights_version},
        }


def _of_batches(look: BooksView) -> dict[Metric, Row]:
    parts = Counter("session" if one.delivery is None else "tail" if one.is_in_tail else "body" for one in look.batches)
    quiet_s = max((look.now_s - one.progress_s for one in look.batches if one.delivery is not None), default=0.0)
    return {of.BATCHES: _counted(of.BATCHES, parts), of.BATCH_QUIET: {(): quiet_s}}


def _of_pool(pool: PoolView) -> dict[Metric, Row]:
    tokens: Counter = Counter(dict.fromkeys(((kind, "none") for kind in ("local", "pool")), 0))
    failures = Counter(dict.fromkeys(of.POOL_OPERATIONS, 0))
    for name, count in pool.counts.items():
        event, _, cause = name.partition(".")
        if event in POOL_TOKENS:
            tokens[of.CONTEXT_TOKENS.row(POOL_TOKENS[event], cause or "none")] += count
        elif event.endswith("_failed"):
            failures[event.removesuffix("_failed")] += count
    status, ways = pool.status, {"load": "loaded_bytes", "save": "saved_bytes"}
    found = {
        of.CONTEXT_TOKENS: dict(tokens),
        of.POOL_BYTES: {(way,): pool.counts.get(name, 0) for way, name in ways.items()},
        of.POOL_FAILURES: _counted(of.POOL_FAILURES, failures),
        of.POOL_UP: {(): int(status is not None)},
    }
    if status is not None:
        found[of.POOL_USED] = {("memory",): status["dram_bytes"], ("ssd",): status["ssd_bytes"]}
        found[of.POOL_CAPACITY] = {("memory",): status["dram_capacity_bytes"], ("ssd",): status["ssd_capacity_bytes"]}
    return found


def _faults(contained: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in contained.items():
        found[FAULT_OF_PLACE.get(name.partition(".")[0], "contained")] += count
    return found


def _counted(metric: Metric, counts: Mapping[str, float]) -> Row:
    """Returns the rows of a metric with one label: every value of it, 0 where there is none; other values together."""
    (values,) = metric.labels.values()
    rows = {(value,): 0 for value in values}
    for value, count in counts.items():
        row = metric.row(value)
        rows[row] = rows.get(row, 0) + count
    return rows
