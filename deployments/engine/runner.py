"""Runs one engine on its own thread: an inbox of commands, and steps while there is work.

Invariant: every submitted chunk is answered exactly once, by one call of its `on_done` on this thread.
The answer is a ChunkResult or an exception.
A bad chunk fails alone. A failed step fails all chunks and leaves `healthy` False.
Called by the engine replica (deployments/engine/replica.py) and by tests; safe from any thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from tailrace.deployments.context.context_client import ContextClient
from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.engine.stepper import Stepper
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.errors import EngineDown
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.config import PoolEndpoint

OnDone = Callable[[ChunkResult | Exception], None]

# Seconds between snapshots of an idle engine, so that `observed_at` does not look stale.
IDLE_SNAPSHOT_S = 0.25


class EngineRunner:
    """One engine and its thread. `rank` is this replica's number on its node; it selects the replica's cores.

    Construction returns when the engine can serve (5 to 10 s for a small model). It passes on vLLM's exceptions.
    """

    def __init__(
        self,
        config: EngineConfig,
        replica_id: str,
        weights_version: int = 0,
        rank: int = 0,
        pool: PoolEndpoint | None = None,
        feed: ContextClient | None = None,
        model: Drafters | None = None,
    ):
        self._inbox: SimpleQueue[tuple] = SimpleQueue()
        self._on_done: dict[str, OnDone] = {}
        self._behind: deque[tuple] = deque()  # a load of weights that waits for running chunks, and later commands
        self._lock = threading.Lock()  # between `submit` and the end of the thread, which answers the remaining calls
        self._down: EngineDown | None = None
        started: Future[EngineStats] = Future()
        arguments = (started, config, replica_id, weights_version, rank, pool, feed, model)
        self._thread = threading.Thread(target=self._main, args=arguments, daemon=True, name="engine")
        self._thread.start()
        self._stats = started.result()

    def submit(self, chunk: ChunkRequest, on_done: OnDone) -> None:
        """Queues a chunk. `on_done` gets its result, ValueError when it is refused, or EngineDown."""
        with self._lock:
            down = self._down
            if down is None:
                self._inbox.put((self._add, chunk, time.monotonic(), on_done))
        if down is not None:
            on_done(down)

    def abort(self, chunk_id: str, keep_kv: bool = False) -> None:
        """Ends a chunk after the step in progress, as ABORTED with its tokens so far; unknown ids are ignored.

        `keep_kv`: the sample will continue elsewhere, so its KV is worth saving.
        """
        self._inbox.put((self._abort, chunk_id, keep_kv))

    def reset_cache(self) -> Future[bool]:
        """Drops the KV of chunks that have ended. Gives False, and drops nothing, while chunks are running."""
        return self._ask(self._reset_cache)

    def load_weights(self, version: int, source: str) -> Future[None]:
        """Puts the weights in folder `source` into the running model, as `version`, after the chunks in flight.

        Chunks submitted before this call end under the old version. Chunks submitted after it wait for the load.
        They are then checked against the current version: the new one, or the old one when the load was refused.
        The future gets ValueError when the folder does not fit (the old weights continue).
        It gets EngineDown when the engine stops first. A failure half-way ends the engine.
        Takes seconds, during which `stats` shows the snapshot from before the load.
        """
        return self._ask(self._load, version, source)

    def weights_refusal(self, source: str) -> Future[str | None]:
        """Gives the reason, in one line, why `load_weights` would refuse, or None. Changes nothing, at any time."""
        return self._ask(self._refusal, source)

    def stats(self) -> EngineStats:
        """Returns the latest snapshot, made after a step; costs nothing."""
        return self._stats

    @property
    def healthy(self) -> bool:
        """Returns False once the engine is stopped or broken, which is final."""
        return self._down is None and self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread after the step in progress; outstanding chunks get EngineDown."""
        self._inbox.put((self._stop,))
        self._thread.join()

    def _ask(self, command: Callable, *args) -> Future:
        answer: Future = Future()
        with self._lock:
            if self._down is None:
                self._inbox.put((command, *args, answer))
            else:
                answer.set_exception(self._down)
        return answer

    def _main(self, started: Future, *arguments) -> None:
        try:
            self._stepper = Stepper(*arguments)
            started.set_result(self._stepper.stats())
        except Exception as error:  # noqa: BLE001 - the edge of the thread: the constructor raises it
            started.set_exception(error)
            return
        try:
            while self._down is None:
                self._obey()
                if self._stepper.busy:
                    for chunk_id, result in self._stepper.step():
                        self._on_done.pop(chunk_id)(result)
                self._catch_up()
                self._stats = self._stepper.stats()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: every chunk gets the error, Serve restarts
            with self._lock:
                self._down = EngineDown(f"engine {self._stats.replica_id}: a step failed: {error!r}")
        self._answer_all(self._down)
        self._stepper.close()

    def _obey(self) -> None:
        """Runs the commands in the inbox; waits for one when there is nothing to step."""
        try:
            command, *args = self._inbox.get(timeout=0 if self._stepper.busy else IDLE_SNAPSHOT_S)
            while True:
                if self._waits(command, args):
                    self._behind.append((command, *args))
                else:
                    command(*args)
                command, *args = self._inbox.get_nowait()
        except Empty:
            return

    def _waits(self, command: Callable, args: list) -> bool:
        """Returns whether a command waits: a load for chunks in flight; later chunks and their aborts for the load."""
        if command == self._load:
            return bool(self._behind or self._on_done)
        later = command == self._add or (command == self._abort and args[0] not in self._on_done)
        return later and bool(self._behind)

    def _catch_up(self) -> None:
        while self._behind and not (self._on_done and self._behind[0][0] == self._load):
            command, *args = self._behind.popleft()
            command(*args)

    def _add(self, chunk: ChunkRequest, submitted_s: float, on_done: OnDone) -> None:
        try:
            self._stepper.add(chunk, submitted_s)
        except ValueError as refusal:  # the edge between one caller's mistake and the shared engine
            on_done(refusal)
        else:
            self._on_done[chunk.chunk_id] = on_done

    def _abort(self, chunk_id: str, keep_kv: bool) -> None:
        self._stepper.abort(chunk_id, keep_kv)

    def _load(self, version: int, source: str, loaded: Future[None]) -> None:
        try:
            self._stepper.load_weights(version, source)
        except Exception as error:  # the future gets any error; a refusal harms no other chunk
            loaded.set_exception(error)
            if not isinstance(error, ValueError):
                raise
        else:
            self._stats = self._stepper.stats()  # before the caller can look
            loaded.set_result(None)

    def _refusal(self, source: str, answer: Future[str | None]) -> None:
        answer.set_result(self._stepper.weights_refusal(source))

    def _reset_cache(self, forgotten: Future[bool]) -> None:
        forgotten.set_result(self._stepper.reset_cache())

    def _stop(self) -> None:
        with self._lock:
            self._down = EngineDown("the engine was stopped")

    def _answer_all(self, down: EngineDown) -> None:
        for on_done in self._on_done.values():
            on_done(down)
        self._on_done.clear()
        while not self._inbox.empty():
            self._behind.append(self._inbox.get())
        for command, *args in self._behind:
            if command == self._add:
                args[-1](down)
            elif command in (self._load, self._refusal, self._reset_cache):
                args[-1].set_exception(down)
