"""One vLLM engine and the chunks it runs; a plain object for a single thread (the runner's).

Invariant: an added chunk ends exactly once, by `step`, by `abort` or by the end of the engine.
A refused chunk changes nothing; a chunk that makes steps raise ends alone, see recovery.py.
An abort loses no token that has arrived.
"""

import time
from dataclasses import replace
from functools import partial

import numpy as np

from tailrace.deployments.context.context_client import ContextClient
from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.engine import warmup
from tailrace.deployments.engine.adapters import Adapters
from tailrace.deployments.engine.engine_chunk import EngineChunk, never_begun
from tailrace.deployments.engine.engine_weights import EngineWeights
from tailrace.deployments.engine.recovery import Recovery
from tailrace.deployments.engine.redraws import Redraws
from tailrace.deployments.engine.step_outputs import StepOutput, StepOutputs
from tailrace.deployments.engine.step_pace import StepDone, StepPace
from tailrace.deployments.messages.chunk import WEIGHTS, ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.close_calls import count_margins
from tailrace.deployments.messages.errors import RequestRefused, one_line
from tailrace.deployments.vllm_exact.async_scheduling import DEPTH
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.launch import launch
from tailrace.deployments.vllm_exact.patches import set_proposed
from tailrace.deployments.vllm_exact.requests import Requests
from tailrace.kvpool.pool_config import PoolEndpoint
from tailrace.policies.models.performance_estimator import PerformanceEstimator
from tailrace.policies.protocol.events import ChunkEnd

ENDS = {"stop": ChunkEnd.STOP, "length": ChunkEnd.LENGTH}


class Stepper:
    """Builds the engine on construction (5 to 10 s). Passes on vLLM's exceptions about a bad model folder."""

    def __init__(
        self,
        config: EngineConfig,
        replica_id: str,
        weights_version: int,
        rank: int,
        pool: PoolEndpoint | None = None,
        feed: ContextClient | None = None,
        model: Drafters | None = None,
    ):
        began_s, self._engine = time.monotonic(), launch(config, rank, pool, config.runs_ahead)
        self._outputs = StepOutputs(self._engine)
        self._pace = StepPace(self._outputs, time.monotonic, lambda: self._pool.scheduled if self._pool else (0, 0))
        self.weights = EngineWeights(self._engine, weights_version)
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._running: dict[str, EngineChunk] = {}  # by chunk id
        self._unscheduled: dict[str, EngineChunk] = {}  # chunks that no step has computed yet
        self._saving: dict[str, tuple[EngineChunk, ChunkResult]] = {}  # ended chunks whose KV is being saved
        self._ended: list[tuple[str, ChunkResult | Exception]] = []  # not returned by `step` yet
        self.progress_s = 0.0  # when a step last made tokens, on the monotonic clock
        self._past_preemptions = 0
        self.adapters = Adapters(self._engine, lambda: WEIGHTS in self.weights.asleep)
        exact = config.close_call_tolerance, config.redraw_close_calls
        self._requests = Requests(self._engine, *exact, self.adapters.request)
        if self._requests.eos_token_id is None:
            raise ValueError(f"model {config.model}: its tokenizer names no end-of-sequence token")
        self._constant = {
            **self._requests.limits(), "replica_id": replica_id, "max_running": config.max_running,
            "max_loras": self.adapters.slots, "keeps_routes": config.keeps_routes,
            "draft_tokens": config.draft_tokens,
        }  # fmt: skip
        self._performance, self._pool, self._drafts = PerformanceEstimator(), None, None
        if config.draft.drafts:
            # After `launch`: numba counts its threads on import; two on one core wait 1.4 s a step for each other.
            from tailrace.deployments.drafting.drafts import EngineDrafts
            from tailrace.deployments.drafting.vllm_proposals import VllmProposals

            length, vocabulary = self._constant["max_model_len"], self._requests.vocabulary
            of_vllm = VllmProposals(config.proposed_tokens, partial(set_proposed, self._engine), config.runs_ahead)
            self._drafts = EngineDrafts(config.sized_draft, length, feed, model, vocabulary, vllm=of_vllm)
            self._performance = self._drafts.performance
        if pool is not None:
            # After `launch`, which imports vLLM once its settings are made; other importers of this file need no vLLM.
            from tailrace.deployments.engine.pool_client import PoolClient

            self._pool = PoolClient(self._engine, pool.config.save_deadline_s, self._performance)
            self._constant |= {"key_prefixes": self._pool.key_prefixes, "token_bytes": self._pool.token_bytes}
        self._redraws = Redraws(self._outputs, self._requests, pool is not None, self._forget, self._replace)
        possible = (DEPTH if config.runs_ahead else 1) * (1 + config.draft_tokens)
        parts = self._requests, self._redraws, self._pool, possible
        self._recovery = Recovery(self._engine, *parts, self._forget, self._restart)
        self._suspects = self._recovery.suspects
        warmup.warm_up(self, config.max_running, config.draft_tokens)
        self.reset_cache()
        self._pace.reset()
        self._performance.start_s = time.monotonic() - began_s

    def draft_for_all(self, token_ids: list[int]) -> None:
        """Sets this draft for the next step on every chunk that decodes."""
        for running in self._running.values():
            if running.first_token_s is not None:
                running.request.spec_token_ids = list(token_ids)

    @property
    def busy(self) -> bool:
        """True while a step has work: chunks to run, or finished ones to release."""
        waits = self._ended or self._running or self.adapters.waiting() or self._scheduler.has_requests()
        return bool(waits or self._pace.in_flight or self._saving)

    def add(self, chunk: ChunkRequest, submitted_s: float) -> None:
        """Queues a chunk inside vLLM, or here until its adapter can run.

        Raises RequestRefused, one line, if no engine can run it, and ValueError if another one may.
        """
        here = chunk.chunk_id in (*self._running, *self.adapters.waiting())
        if (refusal := "already running here" if here else self.weights.chunk_refusal(chunk)) is not None:
            raise ValueError(f"chunk {chunk.chunk_id}: {refusal}")
        if (refusal := self._requests.refusal(chunk)) is not None:
            raise RequestRefused(f"chunk {chunk.chunk_id}: {refusal}")
        if self.adapters.admits(chunk):
            self._begin(chunk, submitted_s)
        else:
            self.adapters.wait(chunk, submitted_s)

    def _begin(self, chunk: ChunkRequest, submitted_s: float) -> None:
        self.adapters.take(chunk)
        kv = self._pool.wish(chunk) if self._pool is not None else None
        try:
            request = self._requests.add(chunk.chunk_id, chunk, chunk.token_ids, chunk.max_tokens, kv)
        except Exception:  # after any error its adapter must be free again
            self.adapters.free(chunk)
            raise
        running = EngineChunk(chunk, request.request_id, request, submitted_s)
        self._running[chunk.chunk_id] = self._unscheduled[chunk.chunk_id] = running
        self._suspects.join(chunk.chunk_id)
        try:
            if self._drafts is not None:
                self._drafts.open(chunk, request)
        except Exception:  # after any error nothing of the chunk must stay
            self._leave(running, keep_kv=False)
            self._drop(running)
            raise

    def abort(self, chunk_id: str, keep_kv: bool) -> None:
        """Ends a chunk, if it runs, with its tokens so far. `step` returns the result once its KV is saved."""
        if (running := self._running.get(chunk_id)) is not None:
            self._leave(running, keep_kv)
            self._hand_over(running, self._end(chunk_id, ChunkEnd.ABORTED, keep_kv))
        elif (waiting := self.adapters.withdraw(chunk_id)) is not None:
            self._ended.append((chunk_id, never_begun(*waiting)))

    def _leave(self, running: EngineChunk, keep_kv: bool) -> None:
        """Ends a chunk's request in vLLM."""
        if self._pool is not None and not keep_kv:
            self._pool.forgo(running.request_id)
        self._requests.abort(running.request_id)

    def step(self) -> list[tuple[str, ChunkResult | Exception]]:
        """Runs one engine step. Returns the chunks that ended since the previous one, by chunk id.

        An exception in the step ends the chunk to blame, once that is known. Raises the exception if the engine is to
        blame.
        """
        for chunk, submitted_s in self.adapters.admitted():
            try:
                self._begin(chunk, submitted_s)
            except Exception as error:  # noqa: BLE001 - the edge of a chunk: it ends with the error
                self._ended.append((chunk.chunk_id, error))
        for running, error in self._recovery.arrange(self._running):
            self._fail(running, error)
        try:
            made = self._step()
        except Exception as error:  # noqa: BLE001 - the edge of a step: the chunk to blame gets the error
            self._recover(error)
        else:
            self._recovery.passed(made)
        ended, self._ended = self._ended, []
        return ended

    def _recover(self, error: Exception) -> None:
        self._pace.abandon()
        for running in [one for one in self._running.values() if one.reason is not None]:  # they have all their tokens
            try:
                self._finish(running.chunk.chunk_id, running.reason)
            except Exception as other:  # noqa: BLE001 - the edge of a chunk: it ends with the error
                self._fail(running, other)
        if (blamed := self._recovery.after(error, self._running)) is not None:
            reason = f"chunk {blamed.chunk.chunk_id}: an engine's step fails with it: {one_line(error)}"
            self._fail(blamed, RequestRefused(reason))

    def _fail(self, running: EngineChunk, error: Exception) -> None:
        """Ends a chunk without a result."""
        self._drop(running)
        self._ended.append((running.chunk.chunk_id, error))

    def _drop(self, running: EngineChunk) -> None:
        """Removes a chunk whose request in vLLM has ended."""
        chunk_id = running.chunk.chunk_id
        del self._running[chunk_id]
        self._unscheduled.pop(chunk_id, None)
        self.adapters.free(running.chunk)
        self._past_preemptions += running.request.num_preemptions
        if self._drafts is not None:
            self._drafts.close(chunk_id)
        if not running.is_out:
            self._forget(running.request_id)
        self._suspects.leave(chunk_id)

    def _step(self) -> list[tuple[str, list[int]]]:
        """Runs one engine step. Returns the tokens that arrived, by chunk id."""
        outputs = self._outputs.step(self._pace.begin(self._running.values(), self._suspects.quiet))
        step = self._pace.end()
        self._redraws.after_step(outputs, self._running)
        for running in [one for one in self._unscheduled.values() if one.request.num_computed_tokens > 0]:
            running.scheduled_s = self._pace.began_s
            del self._unscheduled[running.chunk.chunk_id]
        made = [] if step is None else self._after(outputs, step)
        if not self._running:
            self._pace.finish()
        return made

    def _after(self, outputs: list[StepOutput], step: StepDone) -> list[tuple]:
        """Takes the tokens of a step, proposes drafts, and hears from the pool. Returns the tokens by chunk id."""
        work, took_s, now_s = step.work, step.took_s, step.ended_s
        made, made_tokens = self._receive(outputs, now_s)
        samples, tokens = len(made), work.verified_tokens
        decoding_s = took_s if self._drafts is None else self._drafts.vllm.step(took_s, samples, tokens, step.proposed)
        self._performance.step(samples, tokens, decoding_s, made_tokens, now_s, work.context_tokens)
        self.progress_s = now_s if outputs else self.progress_s
        if not (outputs or self._pace.computing):
            time.sleep(0.001)  # waiting for KV from the pool: the other threads get the interpreter
        drafts_pay = self._drafts is not None and self._drafts.propose(self._pace.drafts_in_flight)
        if self._pool is not None:
            self._pool.after_step(took_s, work.scheduled, work.verified_tokens > 0, now_s)
            self._ended += map(self._complete, self._pool.saved())
        self._pace.leave(drafts_pay, bool(self._running))
        return made

    def _receive(self, outputs: list[StepOutput], ended_s: float) -> tuple[list[tuple[str, list[int]]], int]:
        """Takes the outputs of a step, in one pass; redraws may add some. Returns its tokens and their number."""
        made, ended = [], []
        for output in outputs:
            name, token_ids, reason, whole = output
            running = self._running[name]
            if self._requests.redraws or running.chunk.sampling.stop:
                token_ids, reason = self._cut(running, output, outputs)
            if token_ids:
                running.take(token_ids)
                made.append((name, token_ids))
            running.has_tokens(ended_s, whole)
            if reason is not None:
                running.reason = reason
                ended.append((name, reason))
        self._pace.counts["tokens"] += (tokens := sum([len(token_ids) for _, token_ids in made]))
        self._pace.counts["verifications"] += len(made)
        if self._drafts is not None:
            self._drafts.made_by(made)
        for name, reason in ended:
            self._finish(name, reason)
        return made, tokens

    def _cut(self, running: EngineChunk, output: StepOutput, outputs: list) -> tuple[list[int], str | None]:
        """Returns the tokens of an output up to a stop text, the last one redrawn if close; and the reason to end."""
        token_ids, reason, stopped = self._redraws.settle(running, output.token_ids, output.reason, outputs)
        if stopped and reason is None:
            self._redraws.read_routes(running)
            self._leave(running, keep_kv=running.keeps_kv)
        return token_ids, "stop" if stopped else reason

    def _forget(self, request_id: str) -> None:
        """Drops the records of an ended request."""
        self._engine.collective_rpc("take_record", args=(request_id, 0, 0))
        if self._pool is not None:
            self._pool.forget(request_id)

    def _replace(self, chunk_id: str, request) -> None:
        self._past_preemptions += self._running[chunk_id].request.num_preemptions
        if self._drafts is not None:
            self._drafts.replace(chunk_id, request)

    def _restart(self, running: EngineChunk, request) -> None:
        self._past_preemptions += running.request.num_preemptions
        if self._drafts is not None:
            self._drafts.restart(running.chunk.chunk_id, request, running.answer())

    def _finish(self, chunk_id: str, reason: str) -> None:
        running = self._running[chunk_id]
        end = ENDS.get(reason, ChunkEnd.ABORTED)
        result = self._end(chunk_id, end, end is ChunkEnd.LENGTH)
        if reason not in ENDS:
            result = RuntimeError(f"chunk {chunk_id}: vLLM ended it with {reason!r}")
        self._hand_over(running, result)

    def _hand_over(self, running: EngineChunk, result: ChunkResult | Exception) -> None:
        """Returns a result from the next `step`; with a pool, once the saves of its KV have ended."""
        chunk_id, has_kv = running.chunk.chunk_id, self._pool is not None and not running.is_out
        if has_kv and isinstance(result, ChunkResult):
            self._saving[chunk_id] = running, result
            self._pool.save(chunk_id, running.request_id)
            return
        if has_kv:
            self._pool.forget(running.request_id)
        self._ended.append((chunk_id, result))

    def _complete(self, chunk_id: str) -> tuple[str, ChunkResult]:
        """Returns the result of a chunk whose KV is saved."""
        running, result = self._saving.pop(chunk_id)
        return chunk_id, replace(result, **self._pool.fields(running.request_id, running.chunk, result))

    def _end(self, chunk_id: str, end: ChunkEnd, goes_on: bool) -> ChunkResult | Exception:
        """Closes a chunk; returns its result, or why it has none. `goes_on`: its sample may have another chunk here."""
        running = self._running[chunk_id]
        record = self._redraws.keep(running, len(running.token_ids))
        drafts = self._drafts.close(chunk_id, goes_on, record.accepted) if self._drafts is not None else None
        result = running.fault(record) or running.result(end, record, self._requests.tolerance, drafts)
        del self._running[chunk_id]  # only now: it must still be here if anything above raises
        self._unscheduled.pop(chunk_id, None)
        self.adapters.free(running.chunk)
        self._past_preemptions += running.request.num_preemptions
        self._suspects.leave(chunk_id)
        self._pace.counts.update(count_margins(record.margins))
        return result

    def reset_cache(self) -> bool:
        """Drops the KV of chunks that have ended. Returns False, and drops nothing, while chunks are running."""
        return self._engine.reset_prefix_cache()

    def rejoin_pool(self, master_address: str) -> None:
        """Connects to the pool's master at another address. Raises RuntimeError if it does not answer."""
        self._pool.rejoin(master_address)

    def peek(self, chunk_id: str) -> np.ndarray:
        """Returns the tokens that a chunk has made so far, int32; none if it does not run."""
        running = self._running.get(chunk_id)
        return np.array(running.token_ids if running else (), np.int32)

    def stats(self) -> EngineStats:
        """Returns a snapshot as of now."""
        pool, drafts = self._pool, self._drafts
        tokens = {chunk_id: len(chunk.token_ids) for chunk_id, chunk in self._running.items()}
        tokens |= {chunk_id: len(result.token_ids) for chunk_id, (_, result) in self._saving.items()}
        tokens |= dict.fromkeys(self.adapters.waiting(), 0)
        of_drafts, at_s = {"methods": drafts.methods} if drafts else {}, time.time()
        return EngineStats(
            **self._constant | of_drafts | self.weights.report(),
            kv_counts=pool.counts() if pool else {},
            adapters=self.adapters.known(),
            observed_at=at_s,
            steps=self._pace.counts["steps"],
            step_counts=tuple(self._pace.durations),
            running=tokens,
            preemptions=self._past_preemptions + sum(r.request.num_preemptions for r in self._running.values()),
            performance=self._performance.report(time.monotonic(), at_s),
            work={**self._pace.counts, **self._redraws.counts, **(drafts.counts() if drafts else {})},
        )

    def close(self) -> None:
        """Ends vLLM's workers, and the threads and clients of the drafts."""
        if self._drafts is not None:
            self._drafts.stop()
        self._engine.engine_core.shutdown()
