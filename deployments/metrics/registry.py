"""The registry: every metric of the service, by process. Exporters, the board and the tables of the docs are made from
it.

The coordinator's metrics cover the whole service. No label names a replica, a batch or a sample.
"""

from tailrace.deployments.messages.chunk import STEP_BOUNDS_S
from tailrace.deployments.messages.context import Source
from tailrace.deployments.metrics.metric import ANY, Metric
from tailrace.policies.protocol.actions import SampleEnd
from tailrace.policies.protocol.events import ChunkEnd

CHUNK_BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds, in seconds, from a wait in an idle engine to 8,192 tokens at 14 tokens/s."""

WEIGHTS_BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)

HTTP_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds, in seconds, from a status to a long answer of an agent."""

FAULTS = (
    "chunk_failed", "chunk_lost", "replica_lost", "sample_failed", "core_restarted", "contained", "drivers_silent",
    "token_log", "pool",
)  # fmt: skip
"""A chunk that its replica refused or failed, or that a lost replica had; a replica that left unasked; a sample given
up; all batches ended by an error of a policy; a contained error; batches whose drivers are gone; the token log; an
error in a release or prefetch of KV. A pool's master without an answer does not count, see POOL_UP.
"""

CAUSES = (
    "none", "new", "tail", "miss", "below_min", "not_pulled", "paused", "lookup_late", "pull_late", "pull_failed",
)  # fmt: skip
"""Causes for which context tokens were computed, see kvpool/scheduler.py. `none`: tokens that were not."""

POOL_OPERATIONS = ("lookup", "load", "pull", "save", "release", "retire", "move", "prefetch")

SAMPLES = Metric("tailrace_samples", "gauge", "Unended samples", {"state": ("waiting", "running", "held")})
SAMPLES_ENDED = Metric("tailrace_samples_ended", "counter", "Ended samples", {"end": tuple(SampleEnd)})
QUEUE = Metric(
    "tailrace_queue_samples",
    "gauge",
    "Queued samples, by the sign of their batch's priority",
    {"priority": ("low", "normal", "high")},
)
BATCHES = Metric(
    "tailrace_batches", "gauge", "Batches in flight; in the tail: 90 % of the samples have ended, and open sessions",
    {"part": ("body", "tail", "session")},
)  # fmt: skip
BATCH_SECONDS = Metric(
    "tailrace_batch_seconds",
    "counter",
    "Seconds of batches that are over; of the tail: from 90 % of the samples ended to all",
    {"part": ("body", "tail")},
)
BATCH_QUIET = Metric(
    "tailrace_batch_quiet_seconds",
    "gauge",
    "Longest time for which an unended batch has had no chunk's end; 0: there is no batch",
)
BLOCKED = Metric("tailrace_blocked", "gauge", "1: batches are in flight, and no replica can run a chunk")
HELD_BYTES = Metric("tailrace_result_held_bytes", "gauge", "Finished groups that their drivers have not taken")
TOKENS = Metric("tailrace_tokens", "counter", "Tokens that have become part of a sample")
TOKEN_UPDATES = Metric(
    "tailrace_token_updates",
    "counter",
    "Sum over tokens of the versions that came between them and their sample's end: staleness in flight",
)
ENGINE_TOKENS = Metric("tailrace_engine_tokens", "counter", "Tokens that engines have made, copies and lost included")
VERIFICATIONS = Metric("tailrace_verifications", "counter", "Steps that made tokens of a sample, summed over samples")
DRAFT_TOKENS = Metric(
    "tailrace_draft_tokens",
    "counter",
    "Draft tokens, drafted and of them accepted, by source",
    {"source": tuple(source.name.lower() for source in Source), "outcome": ("drafted", "accepted")},
)
CHUNKS = Metric("tailrace_chunks", "counter", "Ends of chunks", {"end": (*ChunkEnd, "failed", "lost")})
CHUNK_SECONDS = Metric(
    "tailrace_chunk_seconds",
    "histogram",
    "Seconds of a chunk in its engine, by phase",
    {"phase": ("queue", "prefill", "decode")},
    bounds=CHUNK_BOUNDS,
)
STEP_SECONDS = Metric("tailrace_step_seconds", "histogram", "Seconds of an engine's step", bounds=STEP_BOUNDS_S)
STEPS_AHEAD = Metric("tailrace_steps_ahead", "counter", "Steps that were scheduled before the tokens of the one before")
PREEMPTIONS = Metric("tailrace_preemptions", "counter", "Preemptions by vLLM; there should be none")
MOVES = Metric(
    "tailrace_moves",
    "counter",
    "Chunks on another replica than the sample's last one, by where their KV came from",
    {"kv": ("pulled", "recomputed")},
)
CONTEXT_TOKENS = Metric(
    "tailrace_context_tokens",
    "counter",
    "Context tokens of chunks, by where their KV came from, and why it was computed",
    {"kv": ("local", "pool", "recomputed"), "cause": CAUSES},
)
POOL_BYTES = Metric("tailrace_pool_bytes", "counter", "Bytes between engines and pool", {"way": ("load", "save")})
POOL_FAILURES = Metric(
    "tailrace_pool_failures", "counter", "Failed operations of the pool, by keys", {"operation": POOL_OPERATIONS}
)
POOL_USED = Metric("tailrace_pool_used_bytes", "gauge", "KV in the pool", {"tier": ("memory", "ssd")})
POOL_CAPACITY = Metric("tailrace_pool_capacity_bytes", "gauge", "Room for KV", {"tier": ("memory", "ssd")})
POOL_UP = Metric("tailrace_pool_up", "gauge", "1: the pool's master answers; absent without a pool")
REPLICAS = Metric(
    "tailrace_replicas",
    "gauge",
    "Engine replicas; other_weights: they load, sleep or are paused",
    {"state": ("busy", "idle", "closing", "aside", "other_weights")},
)
REPLICAS_WANTED = Metric("tailrace_replicas_wanted", "gauge", "Engine replicas wanted")
REPLICA_SECONDS = Metric("tailrace_replica_seconds", "counter", "Seconds of engine replicas, by state", REPLICAS.labels)
FAULTS_SEEN = Metric("tailrace_faults", "counter", "Faults that the service went through", {"kind": FAULTS})
WEIGHTS_VERSION = Metric("tailrace_weights_version", "gauge", "Version of the weights")
WEIGHTS_SECONDS = Metric(
    "tailrace_weights_seconds",
    "histogram",
    "Seconds for which a replica made no token for a load of weights",
    bounds=WEIGHTS_BOUNDS,
)
COORDINATOR_SECONDS = Metric("tailrace_coordinator_seconds", "gauge", "Seconds since this coordinator began")

COORDINATOR = (
    SAMPLES, SAMPLES_ENDED, QUEUE, BATCHES, BATCH_SECONDS, BATCH_QUIET, BLOCKED, HELD_BYTES, TOKENS, TOKEN_UPDATES,
    ENGINE_TOKENS, VERIFICATIONS, DRAFT_TOKENS, CHUNKS, CHUNK_SECONDS, STEP_SECONDS, STEPS_AHEAD, PREEMPTIONS, MOVES,
    CONTEXT_TOKENS, POOL_BYTES, POOL_FAILURES, POOL_USED, POOL_CAPACITY, POOL_UP, REPLICAS, REPLICAS_WANTED,
    REPLICA_SECONDS, FAULTS_SEEN, WEIGHTS_VERSION, WEIGHTS_SECONDS, COORDINATOR_SECONDS,
)  # fmt: skip
"""Metrics of the whole service, read by the coordinator."""

REASONS = ("token", "role", "body", "quota", "away", "content", "max_open", "route")

HTTP_REQUESTS = Metric(
    "tailrace_gateway_requests",
    "counter",
    "Answered requests; status 499: the client had left, 0: the gateway has stopped",
    {"route": ANY, "status": ANY},
)
HTTP_REFUSED = Metric("tailrace_gateway_refused", "counter", "Refused requests, by reason", {"reason": REASONS})
HTTP_SECONDS = Metric(
    "tailrace_gateway_request_seconds",
    "histogram",
    "From a request to the end of its answer",
    {"route": ANY},
    bounds=HTTP_BOUNDS,
)
HTTP_OPEN = Metric("tailrace_gateway_open_requests", "gauge", "Requests in progress")

GATEWAY = (HTTP_REQUESTS, HTTP_REFUSED, HTTP_SECONDS, HTTP_OPEN)
"""Metrics of one replica of the gateway."""

REGISTRY = COORDINATOR + GATEWAY
