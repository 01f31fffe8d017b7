"""Admission of batches and samples: they wait while the service is paused, or while a change of its core is due.

A trainer may pause the service around an update: no chunk starts until it is resumed. Invariant: a pause changes no
token. Samples in flight keep their tokens and continue with the next one. The core sees a paused replica as one that
holds other weights, so it starts nothing there, and every other law holds. A new coordinator is not paused. Owned by
`Rollouts`.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

from tailrace.deployments.batches.live_batches import LiveBatches
from tailrace.deployments.coordinator.chunk_runner import ChunkRunner
from tailrace.deployments.coordinator.core_holder import CoreHolder
from tailrace.deployments.coordinator.loop import Loop
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.weights import OTHER_WEIGHTS, Weights
from tailrace.deployments.messages.rollout import BatchSettings, Rejected
from tailrace.policies.protocol.actions import AbortChunk


class PauseMode(StrEnum):
    """Treatment of samples in flight at a pause, as in vLLM's `/pause`."""

    KEEP = "keep"  # samples in flight wait
    WAIT = "wait"  # samples in flight end first, unless the service is paused; new samples wait outside the core
    ABORT = "abort"  # samples in flight end with their tokens so far


class Admission:
    """`cancel_all`: ends every sample in flight with its tokens so far."""

    def __init__(
        self,
        loop: Loop,
        core_holder: CoreHolder,
        registry: ReplicaRegistry,
        weights: Weights,
        batches: LiveBatches,
        runner: ChunkRunner,
        cancel_all: Callable[[], object],
    ):
        self._loop, self._core_holder, self._registry, self._weights = loop, core_holder, registry, weights
        self._batches, self._runner, self._cancel_all = batches, runner, cancel_all
        self._draining = 0  # number of calls that wait for samples in flight to end, while new ones wait
        self._waiting: list[str] = []
        self._changed = asyncio.Event()

    @property
    def held(self) -> bool:
        """True while no chunk may start."""
        return self._weights.held

    @property
    def is_paused(self) -> bool:
        return self.held or self._draining > 0

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the batches that wait to be admitted."""
        return tuple(self._waiting)

    # ---- admission -------------------------------------------------------------------------------

    async def refusal(self, message: BatchSettings) -> Rejected | None:
        """Returns Rejected if a batch cannot run under the present weights, else None."""
        await self._loop.looked.wait()  # a new coordinator does not know its replicas' weights yet
        return self._weights.refusal(message)

    async def admitted(self, batch_id: str, at_once: Callable[[], object]) -> None:
        """Waits until a change of the core that is due has been made: the batches before it end, and no other batch
        begins meanwhile. A pause with mode `wait` holds new batches in the same way.

        `at_once`: returns whether the batch need not wait, for example because it adds groups to one that runs.
        """
        while ((self._core_holder.due and self._batches) or self._draining) and not at_once():
            self._waiting.append(batch_id)
            self._changed.clear()
            try:
                await self._changed.wait()
            finally:
                self._waiting.remove(batch_id)

    def look_again(self) -> None:
        """Has what waits to be admitted see whether it still has to."""
        self._changed.set()

    def exchange_core(self) -> None:
        """Makes the change of the core that is due, if no batch is in flight."""
        self._core_holder.expire_journal()
        if not self._batches:
            self._core_holder.exchange(self._registry.joined.values())
            self._changed.set()

    # ---- pauses ------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Pauses the service. Returns once no chunk runs, or at a resume. The newer of two pauses wins.

        Raises ValueError for a mode that is none of PauseMode.
        """
        mode = PauseMode(mode)
        self._draining = self._draining + 1 if mode is PauseMode.WAIT and not self.held else 0
        try:
            while self._draining and self._core_holder.in_flight():
                await self._loop.turn()
        except asyncio.CancelledError:  # its caller has left
            self._draining = max(0, self._draining - 1)
            self._changed.set()
            raise
        if mode is PauseMode.WAIT and not self.is_paused:
            return  # resumed meanwhile
        self._draining, self._weights.held = 0, True
        self._changed.set()
        for event in self._registry.rejoin(OTHER_WEIGHTS, self._loop.now()):
            self._loop.tell(event)
        if mode is PauseMode.ABORT:
            self._cancel_all()
        await self._stop_chunks()

    async def _stop_chunks(self) -> None:
        stopped: set[str] = set()
        await self._loop.turn()  # a turn that was under way may have started chunks
        while self.held and self._runner.calls:
            for chunk_id, replica_id in self._runner.watch.running():
                if chunk_id not in stopped:
                    stopped.add(chunk_id)
                    self._runner.abort(AbortChunk(chunk_id, replica_id, True, "paused"))
            await self._loop.turn()

    def resume(self) -> None:
        """Ends a pause. Changes nothing if there is none."""
        self._draining, self._weights.held = 0, False
        self._changed.set()
        self._loop.look_soon()
