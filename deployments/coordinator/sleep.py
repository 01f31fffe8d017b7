"""The sleep of a service: engines give the memory of weights and KV back to a trainer that shares their device.

Invariant: a sleep is a pause that `resume` does not end. Samples in flight continue after it with the next token, since
only KV is lost. Weights come back by an ordinary load, checked against their digest, before anything starts. A replica
that joins meanwhile is put to sleep. A new coordinator that finds more replicas asleep than awake continues the sleep.
An update of the weights wakes the weights. If a sleep and a wake-up or an update overlap, the later call holds, and the
earlier one is refused. Owned by `Rollouts`.
"""

import asyncio
from collections.abc import Collection, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING

from tailrace.deployments.coordinator.admission import Admission
from tailrace.deployments.coordinator.loop import Loop
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.weights import Weights
from tailrace.deployments.messages.chunk import KV_CACHE, TAGS, WEIGHTS, EngineStats
from tailrace.deployments.messages.command import FallAsleep, WakeKv
from tailrace.deployments.messages.errors import ReplicaLost, one_line
from tailrace.deployments.messages.rollout import Rejected

if TYPE_CHECKING:  # it loads Ray, and this class needs none of it
    from tailrace.deployments.coordinator.engine_client import EngineClient


class Sleep:
    """Each call waits for the first reports of the replicas, so that a new coordinator knows which of them sleep."""

    def __init__(
        self, loop: Loop, engines: "EngineClient", registry: ReplicaRegistry, weights: Weights, admission: Admission
    ):
        self._loop, self._engines, self._registry = loop, engines, registry
        self._weights, self._admission = weights, admission
        self._asking: set[str] = set()  # replicas that are being put to sleep, or whose KV is being woken
        self._kv_asleep = False
        self._sleeps = self._wakes = 0  # calls so far that put the service to sleep, and that wake it
        self._pausing = 0  # sleeps that wait for their pause
        self._decided = False  # True once a call has decided whether the service sleeps
        self.problem: str | None = None  # the error of a replica that did not fall asleep

    @property
    def tags(self) -> tuple[str, ...]:
        """The parts of memory that are asleep."""
        asleep = {WEIGHTS: self._weights.asleep, KV_CACHE: self._kv_asleep}
        return tuple(tag for tag in TAGS if asleep[tag])

    async def begin(self, mode: str) -> Rejected | None:
        """Puts the service to sleep. Returns once every replica has given its memory back; or Rejected if one cannot,
        with all replicas awake and resumed, or if another call has woken the service meanwhile.
        """
        await self._loop.looked.wait()
        wakes, self._sleeps, self._pausing = self._wakes, self._sleeps + 1, self._pausing + 1
        try:
            await self._admission.pause(mode)
        finally:
            self._pausing -= 1
        if self._wakes != wakes:
            return Rejected(reason="the service was woken before it slept")
        if not self._admission.held:
            return Rejected(reason="the service was resumed before it slept")
        self._weights.asleep, self._kv_asleep, self._decided, self.problem = True, True, True, None
        await asyncio.gather(*map(self._put_to_sleep, self._registry.reports))
        while self.problem is None and self.tags == TAGS and self._awake():
            await self._loop.look()
        if self.problem is None:
            return None if self.tags == TAGS else Rejected(reason="the service was woken before it slept")
        refused, self.problem = Rejected(reason=f"the service does not sleep: {self.problem}"), None
        return await self.end(TAGS) or refused

    async def end(self, tags: Collection[str]) -> Rejected | None:
        """Wakes these parts; the pause ends once all parts are awake. Returns Rejected if the weights do not come
        back, or if another call has put the service to sleep meanwhile.
        """
        await self._loop.looked.wait()
        self._decided = True
        self._wake()
        sleeps, again = self._sleeps, Rejected(reason="the service was put to sleep again before it woke")
        if not self.tags:
            return None
        if WEIGHTS in tags and self._weights.asleep:
            self._weights.asleep = False
            loaded = await self._weights.loaded()
            if self._sleeps != sleeps:
                return again
            if isinstance(loaded, Rejected):
                return loaded
        if KV_CACHE in tags and self._kv_asleep:
            asleep = [name for name, one in self._registry.reports.items() if KV_CACHE in one.asleep]
            calls = [self._engines.ask(name, WakeKv()) for name in asleep]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            if self._sleeps != sleeps:
                return again
            for answer in answers:
                if isinstance(answer, ValueError | RuntimeError):
                    return Rejected(reason=f"the KV cache did not wake: {one_line(answer)}")
            self._kv_asleep = False
        if not self.tags:
            self._admission.resume()
        return None

    async def resume(self) -> Rejected | None:
        """Ends a pause. Returns Rejected while the service sleeps."""
        await self._loop.looked.wait()
        if self.tags:
            return Rejected(reason="the service sleeps; wake it up")
        self._admission.resume()
        return None

    def wake_weights(self) -> None:
        """Lets replicas load the wanted weights again, for an update of them."""
        self._wake()
        self._weights.asleep = False

    def look(self, reports: Collection[EngineStats], first: bool) -> list[Coroutine]:
        """Returns calls that put replicas to sleep or wake their KV. `first`: this coordinator has seen no report
        before.
        """
        if first and not self._decided and (tags := slept(reports)):
            self._weights.asleep, self._kv_asleep, self._weights.held = WEIGHTS in tags, KV_CACHE in tags, True
        if self._weights.asleep:
            return [self._put_to_sleep(one.replica_id) for one in reports if WEIGHTS not in one.asleep]
        if self._kv_asleep:
            return []
        return [self._wake_kv(one.replica_id) for one in reports if KV_CACHE in one.asleep]

    def _wake(self) -> None:
        """Refuses the sleeps that are still in their pause, and ends it."""
        self._wakes += 1
        if self._pausing and not self.tags:
            self._admission.resume()

    def _awake(self) -> list[str]:
        return [name for name, one in self._registry.reports.items() if WEIGHTS not in one.asleep]

    async def _wake_kv(self, replica_id: str) -> None:
        """Wakes the KV of a replica that an earlier coordinator put to sleep."""
        with suppress(Exception):  # it is asked again at the next report
            await self._ask_once(replica_id, WakeKv())

    async def _put_to_sleep(self, replica_id: str) -> None:
        try:
            await self._ask_once(replica_id, FallAsleep())
        except ReplicaLost:
            pass  # its memory is free
        except Exception as error:  # noqa: BLE001 - one replica's error: its weights did not come back, or Ray failed
            self.problem = f"{replica_id}: {one_line(error) if not str(error) else error}"

    async def _ask_once(self, replica_id: str, command: FallAsleep | WakeKv) -> None:
        """Has a replica do a command, unless such a call to it is under way. Raises its errors."""
        if replica_id in self._asking:
            return
        self._asking.add(replica_id)
        try:
            await self._engines.ask(replica_id, command)
        finally:
            self._asking.discard(replica_id)


def slept(reports: Collection[EngineStats]) -> set[str]:
    """Returns the parts that sleep in a service whose coordinator was lost: none unless more replicas sleep than are
    awake.

    A replica that a wake-up of the others did not reach may still sleep, and one that was cut off when they fell asleep
    is awake. A replica without a step has just joined and is not counted.
    """
    asleep = [one for one in reports if one.asleep]
    awake = sum(1 for one in reports if one.steps and not one.asleep)
    return {tag for one in asleep for tag in one.asleep} if len(asleep) > awake else set()
