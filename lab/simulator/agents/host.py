"""Sessions of agents on modelled engines, with a router that sends each request to one of them.

`load` sessions are open at any time: one that ends is replaced by the next one, in a circle. A router decides, see
`routers`; it learns no recorded length, and no gap before it is over. A run is a function of its arguments. Called by
`bench agents`.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

from tailrace.lab.simulator.agents.caches import Tiers
from tailrace.lab.simulator.agents.figures import AgentReplica
from tailrace.lab.simulator.agents.replica import AgentEngine
from tailrace.lab.simulator.agents.request import AgentCounts, AgentRequest
from tailrace.lab.simulator.agents.trace import AgentSession


class Router(Protocol):
    """`stores`: what replicas read beside HBM, if there is any: DRAM and SSD of their `own`, or one `pool`."""

    stores: str

    def begin(self, host: "AgentHost") -> None: ...

    def asks(self, request: AgentRequest) -> None:
        """Takes a request, which it submits now or later."""

    def ended(self, request: AgentRequest, goes_on: bool) -> None:
        """Learns that a stay is over. `goes_on`: tokens of the same turn are left."""

    def tick(self) -> None:
        """Decides, after all that happens at one time."""


class SessionRun:
    """A session that runs: `left` turns of it have not ended; `waiting`: by turn, those that wait for its end."""

    __slots__ = ("left", "number", "session", "waiting")

    def __init__(self, number: int, session: AgentSession):
        self.number, self.session, self.left = number, session, len(session.turns)
        self.waiting: dict[int | None, list[int]] = {}
        for index, turn in enumerate(session.turns):
            self.waiting.setdefault(turn.after, []).append(index)


class AgentHost:
    """The loop of the module docstring. `counts`: of the requests that arrive now."""

    def __init__(
        self, sessions: Sequence[AgentSession], model: AgentReplica, replicas: int, router: Router,
        load: int, drafts: tuple[float, float] = (1.0, 1.0),
    ):  # fmt: skip
        """`drafts`: tokens that a sequence makes in a step, and those that it computes."""
        self.model, self.now, self.router = model, 0.0, router
        self.store, stores = self._stores(model, replicas, router.stores)
        rate = model.pool_tokens_s if router.stores == "pool" else model.own_tokens_s
        self.engines = [
            AgentEngine(
                model=model,
                index=index,
                store=store,
                store_tokens_s=rate,
                made=drafts[0],
                cost=drafts[1],
                arrives=self._fetches,
            )
            for index, store in enumerate(stores)
        ]
        self._sessions, self._load = sessions, load
        self._numbers, self._opened = count(), 0
        self._heap: list[tuple] = []
        self._booked = [inf] * replicas
        self.counts = AgentCounts()
        self.turns = 0  # that have ended

    def stored(self, line: object) -> int:
        """Returns the tokens of a line's context in the shared pool."""
        return self.store.find(line)[0] if self.store is not None else 0

    @staticmethod
    def _stores(model: AgentReplica, replicas: int, kind: str) -> tuple[Tiers | None, list[Tiers | None]]:
        if not (model.dram_tokens or model.ssd_tokens):
            return None, [None] * replicas
        if kind == "pool":
            pool = Tiers(model.dram_tokens * replicas, model.ssd_tokens * replicas)
            return pool, [pool] * replicas
        return None, [Tiers(model.dram_tokens, model.ssd_tokens) for _ in range(replicas)]

    def run(self, warm_turns: int, turns: int) -> tuple[AgentCounts, float]:
        """Runs until `warm_turns` turns have ended, and then `turns` more. Returns the counts and the seconds of
        these.
        """
        self.router.begin(self)
        for _ in range(self._load):
            self._open()
        self.router.tick()
        self._until(warm_turns)
        begin_s, self.counts = self.now, AgentCounts()
        self._until(warm_turns + turns)
        return self.counts, self.now - begin_s

    def _until(self, turns: int) -> None:
        while self.turns < turns:
            self.now = self._heap[0][0]
            while self._heap and self._heap[0][0] == self.now:
                _, _, do, subject = heappop(self._heap)
                do(*subject)
            self.router.tick()

    def at(self, time_s: float, do: Callable, *subject) -> None:
        heappush(self._heap, (max(time_s, self.now), next(self._numbers), do, subject))

    # ---- sessions ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        run = SessionRun(self._opened, self._sessions[self._opened % len(self._sessions)])
        self._opened += 1
        for index in run.waiting[None]:
            self._ask(run, index)

    def _ask(self, run: SessionRun, index: int) -> None:
        self.router.asks(AgentRequest(run, index, self.counts, self.now))

    def _over(self, request: AgentRequest) -> None:
        """Ends a turn: what waits for it comes after its gap."""
        run = request.run
        self.turns += 1
        self.counts.work_s += self.model.work_s(request.turn)
        for then in run.waiting.get(request.index, ()):
            self.at(self.now + run.session.turns[then].gap_s, self._ask, run, then)
        run.left -= 1
        if not run.left:
            self._open()

    # ---- engines -----------------------------------------------------------------------------------------

    def submit(self, request: AgentRequest, replica: int) -> None:
        """Sends a request to a replica."""
        engine = self.engines[replica]
        engine.submit(request, self.now)
        self._book(engine)

    def _fetches(self, until_s: float, engine: AgentEngine, request: AgentRequest) -> None:
        self.at(until_s, self._arrive, engine, request, request.ticket)

    def _arrive(self, engine: AgentEngine, request: AgentRequest, ticket: int) -> None:
        engine.arrive(request, ticket, self.now)
        self._book(engine)

    def _book(self, engine: AgentEngine) -> None:
        if engine.due_s < inf and engine.due_s != self._booked[engine.index]:
            self._booked[engine.index] = engine.due_s
            self.at(engine.due_s, self._turn, engine, engine.due_s)

    def _turn(self, engine: AgentEngine, due_s: float) -> None:
        if engine.due_s != due_s:
            return  # it was booked again since
        self._booked[engine.index] = inf
        for request in engine.turn(self.now):
            if request.made >= request.turn.out:
                self._over(request)
            self.router.ended(request, request.made < request.turn.out)
        self._book(engine)
