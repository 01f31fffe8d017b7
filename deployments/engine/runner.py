"""Runs one engine on a thread of its own: an inbox of commands, and steps while there is work.

Invariant: every submitted chunk is answered exactly once, by one call of its `on_done` on this thread, with a
ChunkResult or an exception; a bad chunk fails alone, a failed step fails all and leaves `healthy` False.
Called by the engine replica (deployments/engine/replica.py) and by tests; safe from any thread.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from deployments.engine.config import EngineConfig
from deployments.engine.stepper import Stepper
from deployments.messages import ChunkRequest, ChunkResult, EngineStats

OnDone = Callable[[ChunkResult | Exception], None]

# An idle engine's snapshot is renewed this often, so that it does not look stale to whoever reads `observed_at`.
IDLE_SNAPSHOT_S = 0.25


class EngineDown(RuntimeError):
    """The engine was stopped, or a step of it failed; its chunks must be resumed elsewhere."""


class EngineRunner:
    """`rank` is this replica's number on its node; it decides which cores are its own.

    Construction returns when the engine can serve (5 to 10 s for a small model) and raises what vLLM raises.
    """

    def __init__(self, config: EngineConfig, replica_id: str, weights_version: int = 0, rank: int = 0):
        self._inbox: SimpleQueue[tuple] = SimpleQueue()
        self._on_done: dict[str, OnDone] = {}
        self._lock = threading.Lock()  # between `submit` and the end of the thread, which answers what is left
        self._down: EngineDown | None = None
        started: Future[EngineStats] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(config, replica_id, weights_version, rank, started), daemon=True, name="engine"
        )
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

    def abort(self, chunk_id: str) -> None:
        """Ends a chunk after the step in progress, as ABORTED with its tokens so far; unknown ids are ignored."""
        self._inbox.put((self._abort, chunk_id))

    def reset_cache(self) -> Future[bool]:
        """Forgets the KV of chunks that have ended; False, and nothing is forgotten, while chunks are running."""
        forgotten: Future[bool] = Future()
        with self._lock:
            if self._down is None:
                self._inbox.put((self._reset_cache, forgotten))
            else:
                forgotten.set_exception(self._down)
        return forgotten

    def stats(self) -> EngineStats:
        """The latest snapshot, made after a step; costs nothing."""
        return self._stats

    @property
    def healthy(self) -> bool:
        """False once the engine is stopped or broken; it does not come back."""
        return self._down is None and self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread after the step in progress; outstanding chunks get EngineDown."""
        self._inbox.put((self._stop,))
        self._thread.join()

    def _main(self, config, replica_id, weights_version, rank, started) -> None:
        try:
            self._stepper = Stepper(config, replica_id, weights_version, rank)
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
                self._stats = self._stepper.stats()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: every chunk gets it, Serve restarts
            with self._lock:
                self._down = EngineDown(f"engine {replica_id}: a step failed: {error!r}")
        self._answer_all(self._down)
        self._stepper.close()

    def _obey(self) -> None:
        """Does what is in the inbox; waits for it when there is nothing to step."""
        try:
            command, *args = self._inbox.get(timeout=0 if self._stepper.busy else IDLE_SNAPSHOT_S)
            while True:
                command(*args)
                command, *args = self._inbox.get_nowait()
        except Empty:
            return

    def _add(self, chunk: ChunkRequest, submitted_s: float, on_done: OnDone) -> None:
        try:
            self._stepper.add(chunk, submitted_s)
        except ValueError as refusal:  # the edge between one caller's mistake and everybody's engine
            on_done(refusal)
        else:
            self._on_done[chunk.chunk_id] = on_done

    def _abort(self, chunk_id: str) -> None:
        if (result := self._stepper.abort(chunk_id)) is not None:
            self._on_done.pop(chunk_id)(result)

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
            command, *args = self._inbox.get()
            if command == self._add:
                args[-1](down)
            elif command == self._reset_cache:
                args[-1].set_exception(down)
