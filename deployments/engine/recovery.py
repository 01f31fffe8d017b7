"""Recovery of an engine from a step that raised: its chunks begin again from their tokens so far, as `Suspects`
decides.

Invariants: no token that a chunk has is lost or drawn otherwise. No KV of the raising step is read, or saved under a
name. After it vLLM has no request, so nothing of the step remains. A chunk without a request waits. Exact sampling
makes the tokens those of a run without the fault. Before a chunk is blamed, a healthy request is stepped: if it fails,
the engine is to blame. Owned by the stepper, on the engine's thread; costs nothing until a step raises.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

from tailrace.deployments.engine import warmup
from tailrace.deployments.engine.engine_chunk import EngineChunk
from tailrace.deployments.engine.redraws import Redraws
from tailrace.deployments.engine.suspects import Suspects
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.vllm_exact.requests import Requests

PROBE_TOKENS = 8
"""Number of context tokens of the healthy request."""


class Recovery:
    """`possible`: maximum number of tokens that a step makes for a chunk. `pool`: the pool's client, or None.

    `forget`: drops the records of an ended vLLM request, by vLLM's id. `restart`: takes a chunk and its new request.
    """

    def __init__(
        self,
        engine,
        requests: Requests,
        redraws: Redraws,
        pool,
        possible: int,
        forget: Callable[[str], None],
        restart: Callable[[EngineChunk, object], None],
    ):
        self._engine, self._requests, self._redraws, self._pool = engine, requests, redraws, pool
        self._possible, self._forget, self._restart = possible, forget, restart
        self._core = engine.engine_core.engine_core
        self._states = engine.output_processor.request_states
        self._without_chunks = False  # True if the last step raised although it had no chunk
        self.suspects = Suspects()

    def passed(self, made: Iterable[tuple[str, list[int]]]) -> None:
        """Records that a step has ended without an error, with these tokens."""
        self._without_chunks = False
        if self.suspects.searching:
            for chunk_id, token_ids in made:
                self.suspects.made(chunk_id, len(token_ids))

    def arrange(self, chunks: Mapping[str, EngineChunk]) -> list[tuple[EngineChunk, Exception]]:
        """Gives requests to the chunks that run now, and withdraws those of the others. Returns the chunks that got
        none, with their errors.
        """
        if self.suspects.quiet:
            wanted = [one for one in chunks.values() if one.is_out]
        else:
            runs = set(self.suspects.running())
            wanted = [one for chunk_id, one in chunks.items() if chunk_id in runs and one.is_out]
            for chunk_id, one in chunks.items():
                if chunk_id not in runs and not one.is_out:
                    self._withdraw(one)
        failed = []
        for running in wanted:
            try:
                self._put_back(running)
            except Exception as error:  # noqa: BLE001 - the edge of a chunk: it ends with the error
                failed.append((running, error))
        return failed

    def after(self, error: Exception, chunks: Mapping[str, EngineChunk]) -> EngineChunk | None:
        """Clears the engine after a step that raised. Returns the chunk to blame, if it is known now.

        Raises the error if the engine is to blame; the engine must end then.
        """
        tried = [one for one in chunks.values() if not one.is_out]
        logging.getLogger(__name__).error("a step with %d chunks: %s", len(tried), one_line(error), exc_info=error)
        if not tried and self._without_chunks:
            raise error
        self._without_chunks = not tried
        self._clear(tried)
        if not tried:
            return None
        blamed = self.suspects.raised({one.chunk.chunk_id: self._possible for one in tried})
        if blamed is None:
            return None
        try:
            self._probe()
        except Exception as other:  # a healthy request fails, too
            raise error from other
        self.suspects.blame(blamed)
        return chunks[blamed]

    def _clear(self, tried: list[EngineChunk]) -> None:
        scheduler = self._core.scheduler
        left_over = {name for names in self._engine.collective_rpc("begin_again") for name in names}
        if self._pool is not None:
            scheduler.finished_recving_kv_req_ids |= self._pool.begin_again()  # so that their blocks are freed
        for request_id in scheduler.requests:
            for blocks in scheduler.kv_cache_manager.get_block_ids(request_id):
                scheduler.kv_cache_manager.evict_blocks(set(blocks))
        for running in tried:
            self._withdraw(running)
        others = [*{**scheduler.requests, **self._states}]
        self._engine.abort_request(others, internal=True)
        self._engine.engine_core.abort_requests(list(scheduler.requests))
        for request_id in others:
            self._forget(request_id)
        scheduler.finished_req_ids |= left_over
        self._core.reset_encoder_cache()  # vLLM counts items of the step as encoded

    def _withdraw(self, running: EngineChunk) -> None:
        """Withdraws a chunk's request from vLLM; its KV is not saved."""
        running.redrawn = {at: record for at, record in running.redrawn.items() if at < len(running.token_ids)}
        if self._pool is not None:
            self._pool.forgo(running.request_id)
        self._requests.abort(running.request_id)
        self._redraws.keep(running, len(running.token_ids))
        self._forget(running.request_id)
        running.is_out = True

    def _put_back(self, running: EngineChunk) -> None:
        request = self._redraws.continuing(running, running.context())
        self._restart(running, request)
        running.request, running.request_id, running.is_out = request, request.request_id, False

    def _probe(self) -> None:
        """Draws one token of a healthy request, alone in the engine."""
        chunk = warmup.chunk_of("probe", PROBE_TOKENS, 1)
        self._redraws.draw(chunk, chunk.token_ids, [])
