"""Routers of other services: where a request goes, in their best setting. They admit all, at once.

`sticky`: each session stays on the replica that its first request drew by hash. `prefix`: the replica with the longest
cached prefix unless it has some requests more than the least loaded one, else that one (SGLang's cache-aware router has
this rule with an imbalance threshold; Dynamo and llm-d weigh the same two). Both have DRAM of their own under each
replica's HBM. `round_robin_pool`: the replica with fewest requests, in turn; its KV comes from a pool that all share.
"""

from tailrace.lab.simulator.agents.request import AgentRequest


class Unscheduled:
    """Base: what it routes is submitted at once."""

    stores = "own"

    def begin(self, host) -> None:
        self._host = host

    def tick(self) -> None:
        """Does nothing between events."""

    def asks(self, request: AgentRequest) -> None:
        self._host.submit(request, self._choose(request))

    def _choose(self, request: AgentRequest) -> int:
        """Returns the index of a replica."""
        raise NotImplementedError

    def ended(self, request: AgentRequest, goes_on: bool) -> None:
        """Learns nothing."""


class Sticky(Unscheduled):
    def _choose(self, request: AgentRequest) -> int:
        return request.run.number * 2654435761 % 2**32 * len(self._host.engines) >> 32


class LongestPrefix(Unscheduled):
    def __init__(self, margin: int):
        """`margin`: requests by which a replica may be more loaded than the least loaded one."""
        self._margin = margin

    def _choose(self, request: AgentRequest) -> int:
        engines = self._host.engines
        least = min(engines, key=lambda engine: engine.load)
        hit = max(engines, key=lambda engine: self._held(engine, request))
        if self._held(hit, request) and hit.load <= least.load + self._margin:
            return hit.index
        return least.index

    def _held(self, engine, request: AgentRequest) -> int:
        stored = engine.store.find(request.source)[0] if engine.store is not None else 0
        return max(engine.cache.of(request.source), stored)


class RoundRobinPool(Unscheduled):
    stores = "pool"

    def __init__(self):
        self._next = 0

    def _choose(self, request: AgentRequest) -> int:
        engines = self._host.engines
        self._next += 1
        return min(engines, key=lambda engine: (engine.load, (engine.index - self._next) % len(engines))).index
