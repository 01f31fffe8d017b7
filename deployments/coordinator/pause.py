"""The pause of a service, as trainers ask for one around an update: no chunk starts until it is resumed.

Invariant: a pause changes no token. Samples in flight keep theirs, and continue with the next one. To the core a paused
replica holds other weights, so it starts nothing there, and every other law holds. A new coordinator is not paused.
Owned by `Rollouts`.
"""

from collections.abc import Awaitable, Callable, Collection, Coroutine
from enum import StrEnum

from tailrace.deployments.coordinator.chunk_runner import ChunkRunner
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.weights import OTHER_WEIGHTS, Weights
from tailrace.policies.protocol.actions import AbortChunk
from tailrace.policies.protocol.events import Event


class PauseMode(StrEnum):
    """The fate of samples in flight, as in vLLM's `/pause`."""

    KEEP = "keep"  # they wait
    WAIT = "wait"  # they end first; samples that come meanwhile wait outside of the core
    ABORT = "abort"  # they end with their tokens so far


class Pause:
    """`calls`: ids of running chunks. `in_flight`: number of samples in the core. `cancel_all`: ends these.

    `turn`: returns after a turn of the loop. `later`: gives the core an event in its next turn. `look`: has the
    replicas' reports looked at at once. `open_door`: has the samples at the door look again whether they may pass.
    """

    def __init__(
        self,
        runner: ChunkRunner,
        registry: ReplicaRegistry,
        weights: Weights,
        calls: Collection[str],
        in_flight: Callable[[], int],
        cancel_all: Callable[[], object],
        turn: Callable[[], Awaitable[None]],
        later: Callable[[Event], None],
        spawn: Callable[[Coroutine], object],
        look: Callable[[], None],
        open_door: Callable[[], None],
        now: Callable[[], float],
    ):
        self._runner, self._registry, self._weights = runner, registry, weights
        self._calls, self._in_flight, self._cancel_all = calls, in_flight, cancel_all
        self._turn, self._later, self._spawn, self._now = turn, later, spawn, now
        self._look, self._open_door = look, open_door
        self.draining = False  # samples in flight end, and new ones wait at the door

    @property
    def held(self) -> bool:
        """Whether no chunk starts."""
        return self._weights.held

    @property
    def is_on(self) -> bool:
        return self.held or self.draining

    async def begin(self, mode: PauseMode) -> None:
        """Returns once no chunk runs, or at a resume. Of two pauses the newer one counts."""
        self.draining = mode is PauseMode.WAIT
        while self.draining and self._in_flight():
            await self._turn()
        if mode is PauseMode.WAIT and not self.is_on:
            return  # resumed meanwhile
        self.draining, self._weights.held = False, True
        self._open_door()
        for event in self._registry.rejoin(OTHER_WEIGHTS, self._now()):
            self._later(event)
        if mode is PauseMode.ABORT:
            self._cancel_all()
        await self._stop_chunks()

    async def _stop_chunks(self) -> None:
        stopped: set[str] = set()
        await self._turn()  # one that was under way may have started chunks
        while self.held and self._calls:
            for chunk_id, replica_id in self._runner.watch.running():
                if chunk_id not in stopped:
                    stopped.add(chunk_id)
                    self._spawn(self._runner.abort(AbortChunk(chunk_id, replica_id, True, "paused")))
            await self._turn()

    def end(self) -> None:
        """Resume. Without a pause nothing changes."""
        self.draining = self._weights.held = False
        self._open_door()
        self._look()
