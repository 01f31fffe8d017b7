"""Runs one engine on its own thread. Called by the engine replica (deployments/engine/replica.py) and by tests."""

import threading
from concurrent.futures import Future

from tailrace.deployments.context.context_client import ContextClient
from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.engine.engine_loop import EngineLoop
from tailrace.deployments.engine.stepper import Stepper
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.pool_config import PoolEndpoint

IDLE_SNAPSHOT_S = 0.25
"""Seconds between snapshots of an idle engine, so that `observed_at` does not look stale."""


class EngineRunner(EngineLoop):
    """An EngineLoop with its engine and thread. `rank`: this replica's number on its node; it selects its cores.

    The constructor returns when the engine can serve (5 to 10 s for a small model). vLLM's exceptions pass through it.
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
        started: Future[None] = Future()
        arguments = (config, replica_id, weights_version, rank, pool, feed, model)
        self._thread = threading.Thread(target=self._main, args=(started, arguments), daemon=True, name="engine")
        self._thread.start()
        started.result()

    @property
    def healthy(self) -> bool:
        return super().healthy and self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread, at most one step after the one in progress; outstanding chunks get EngineDown."""
        self.request_stop()
        self._thread.join()

    def _main(self, started: Future, arguments: tuple) -> None:
        try:
            super().__init__(Stepper(*arguments))
            started.set_result(None)
        except Exception as error:  # noqa: BLE001 - the edge of the thread: the constructor raises it
            started.set_exception(error)
            return
        while self.turn(IDLE_SNAPSHOT_S):
            pass
        self.end()
