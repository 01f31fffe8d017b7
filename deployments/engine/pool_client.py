"""One engine's client of the pool: passes requests of chunks to the connector, and reads its reports about their KV.

Invariant: an ended chunk that is saved is named by `saved` exactly once, when its saves have ended or at the save
deadline. The next engine of the sample therefore finds the KV in the pool, and a dead pool costs a bounded wait.
Owned by the stepper.
"""

import time
from collections import Counter
from typing import Any

from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, KvPlan
from tailrace.kvpool.connector import PoolConnector
from tailrace.kvpool.counts import Counts
from tailrace.kvpool.worker import begin_again, layout, probe, rejoin
from tailrace.policies.models.performance_estimator import PerformanceEstimator

CAUSE_OF_NEW = "new"  # a first chunk: its context was not computed before


class PoolClient:
    """`engine`: vLLM's LLMEngine, built with `kvpool.connector`. `save_deadline_s`: maximum wait for saves."""

    def __init__(self, engine, save_deadline_s: float, performance: PerformanceEstimator):
        self._connector: PoolConnector = engine.engine_core.engine_core.scheduler.connector
        self._engine, self._save_deadline_s, self._performance = engine, save_deadline_s, performance
        self._saving: dict[str, tuple[str, float]] = {}  # by request: its chunk's id, and the time of its end
        self._counts: Counter[str] = Counter()
        self._waits = Counts()
        layouts = engine.collective_rpc(layout)
        self.key_prefixes, self.token_bytes = layouts[0][0], sum(size for _, size in layouts)
        for tokens, took_s in engine.collective_rpc(probe)[0]:
            performance.pull(tokens, took_s, time.monotonic())

    def rejoin(self, master_address: str) -> None:
        """Connects to the master at another address. Raises RuntimeError if it does not answer."""
        for problem in filter(None, self._engine.collective_rpc(rejoin, args=(master_address,))):
            raise RuntimeError(problem)

    def wish(self, chunk: ChunkRequest) -> dict:
        """Returns vLLM's `kv_transfer_params` of a chunk. `forgo` can cancel the save later."""
        plan = chunk.kv or KvPlan(chunk.weights_version, None, save=False)
        return {
            "version": plan.version,
            "min_pull_tokens": None if chunk.scores_prompt else plan.min_pull_tokens,
            "save": plan.save,
            "save_stopped": plan.save_stopped,
            "save_prompt": chunk.kv is not None and len(chunk.token_ids) == chunk.prompt_tokens,
        }

    def forgo(self, request_id: str) -> None:
        """Cancels the save of a request whose sample has no further chunk."""
        self._connector.forgo(request_id)

    def begin_again(self) -> set[str]:
        """Ends the pool's half of a step that raised. Returns the requests that wait for loads which never began."""
        begun = self._engine.collective_rpc(begin_again, args=(self._connector.heard,))
        return self._connector.begin_again(min(begun))

    def save(self, chunk_id: str, request_id: str) -> None:
        """Follows the saves of a chunk that has ended."""
        self._saving[request_id] = chunk_id, time.monotonic()

    def forget(self, request_id: str) -> None:
        """Drops the connector's record of a failed request. That of an ended chunk stays until `fields`."""
        if request_id not in self._saving:
            self._connector.take(request_id)

    def saved(self) -> list[str]:
        """Returns the chunks whose saves have ended or are late."""
        now_s, saved = time.monotonic(), []
        for request_id, (_, since_s) in self._saving.items():
            if now_s - since_s > self._save_deadline_s or self._connector.settled(request_id):
                self._waits.took("hold", now_s - since_s)
                saved.append(request_id)
        return [self._saving.pop(request_id)[0] for request_id in saved]

    @property
    def scheduled(self) -> tuple[int, int]:
        """Tokens and requests of the step that was started last."""
        return self._connector.scheduled

    def after_step(self, took_s: float, scheduled: tuple[int, int], decodes: bool, now_s: float) -> None:
        """Records the time of a step of these tokens and requests. `decodes`: True if no chunk was at its prompt or
        waited for KV.
        """
        self._waits.took("step", took_s)
        tokens, chunks = scheduled
        if chunks and not decodes:
            self._performance.prompt(chunks, tokens, took_s, now_s)
        for pulled_tokens, pull_s in self._connector.take_pulls():
            self._performance.pull(pulled_tokens, pull_s, now_s)

    def counts(self) -> dict[str, int]:
        """Returns all counts so far, by COUNTER.CAUSE: transfers to the pool, and tokens by the source of their KV."""
        self._counts += self._waits.take()
        return dict(self._connector.counts + self._counts)

    def fields(self, request_id: str, chunk: ChunkRequest, result: ChunkResult) -> dict[str, Any]:
        """Returns the fields of a chunk's result that the pool knows, and counts its tokens. Called once a chunk."""
        late = not self._connector.settled(request_id)
        traffic = self._connector.take(request_id)
        new = len(chunk.token_ids) == chunk.prompt_tokens
        cause = CAUSE_OF_NEW if new and traffic.cause in ("miss", "not_pulled", "below_min") else traffic.cause
        # A chunk that is aborted before its first token has used none of them.
        pulled_tokens = 0 if cause.startswith("pull_") else min(traffic.pulled_tokens, result.cached_tokens)
        self._counts["local_tokens"] += result.cached_tokens - pulled_tokens
        self._counts["pool_tokens"] += pulled_tokens
        self._counts[f"recomputed_tokens.{cause}"] += result.computed_tokens
        self._counts["save_late"] += late
        context_tokens = len(chunk.token_ids) + len(result.token_ids)
        return {
            "pulled_tokens": pulled_tokens,
            "stored_tokens": min(traffic.saved_tokens, context_tokens),  # vLLM saves drafts after a stop text, too
            "kv_names": b"".join(traffic.names),
            "recompute_cause": cause if result.computed_tokens else "",
        }
