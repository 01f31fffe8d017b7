"""One modelled engine for long contexts: prefill in chunks beside decoding, a prefix cache, KV that is fetched.

As vLLM: requests are admitted first come, first served, while their context fits; cached contexts give way, least
recently used first. Between two changes, time is in closed form: with n decoding sequences of C tokens of context and p
tokens of prefill in a step, k steps take A k + G k^2 / 2, A being the first step and G what contexts add a step. Parts
of steps count by their share. Fetches use one link, one after the other, while others run. If contexts outgrow HBM,
the request admitted last gives up its KV and is queued first. Driven by the host by way of `due_s`.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf, sqrt

from tailrace.lab.simulator.agents.caches import ContextCache, Tiers
from tailrace.lab.simulator.agents.figures import AgentReplica
from tailrace.lab.simulator.agents.request import AgentRequest

BLOCK_TOKENS = 16
"""KV is found again in whole blocks: vLLM's default on GPUs."""

WATERMARK = 0.01
"""Share of KV that stays free as a request is admitted (vLLM's `watermark`): running ones grow into it."""

LEAST = 1e-9


class AgentEngine:
    """`clock_s`: everything is as of then. `store`: DRAM and SSD that it reads; `store_tokens_s`: how fast.
    `made`: tokens that a decoding sequence makes in a step, of which it computes `cost`."""

    def __init__(
        self, model: AgentReplica, index: int, store: Tiers | None, store_tokens_s: float, made: float, cost: float,
        arrives: Callable[[float, "AgentEngine", AgentRequest], None],
    ):  # fmt: skip
        self.model, self.index, self.store, self._store_tokens_s = model, index, store, store_tokens_s
        self._made, self._cost, self._arrives = made, cost, arrives
        self.clock_s, self.due_s = 0.0, inf
        self.cache = ContextCache(model.hbm_tokens)
        self.queue: deque[AgentRequest] = deque()
        self.running: dict[AgentRequest, None] = {}  # admitted, in that order: fetching, in prefill, decoding
        self.load = 0  # requests queued or running
        self._prefill: deque[AgentRequest] = deque()
        self._decoding, self._context, self._held = 0, 0.0, 0.0  # contexts of decoding ones; of all admitted
        self._steps = 0.0  # decode steps so far
        self._ends: list[tuple[float, int, AgentRequest]] = []  # by the step at which they end
        self._number = 0
        self._link_s = 0.0  # until which the link is used
        self._first_s = self._growth_s = self._part = 0.0  # A, G and p

    # ---- calls of the host -------------------------------------------------------------------------------

    def submit(self, request: AgentRequest, now: float) -> None:
        self.load += 1
        request.sent_s, request.fetch_s = now, 0.0
        self._advance(now)
        self.queue.append(request)
        self._admit()
        self._plan()

    def arrive(self, request: AgentRequest, ticket: int, now: float) -> None:
        """Takes a request whose KV has been fetched, unless it was preempted meanwhile."""
        self._advance(now)
        if request in self.running and request.ticket == ticket:
            self._prefill.append(request)
        self._plan()

    def turn(self, now: float) -> list[AgentRequest]:
        """Returns the requests that end now."""
        self._advance(now)
        if self._prefill and self._prefill[0].left <= LEAST:
            self._decode(self._prefill.popleft(), now)
        ended = []
        while self._ends and self._ends[0][0] <= self._steps + LEAST:
            _, number, request = heappop(self._ends)
            if request.number == number:
                self._end(request)
                ended.append(request)
        self._fit()
        self._admit()
        self._plan()
        return ended

    # ---- its parts ---------------------------------------------------------------------------------------

    def _admit(self) -> None:
        room = self.model.hbm_tokens * (1.0 - WATERMARK)
        while self.queue and (not self.running or self._held + self.queue[0].context <= room):
            request = self.queue.popleft()
            here, there, slow = self._find(request)
            self.running[request] = None
            self._held += request.context
            if not request.forks:
                self.cache.take(request.source)
            self.cache.shrink(int(self.model.hbm_tokens - self._held))
            fetched = max(0, there - here)
            hit = max(here, there)
            request.found(here, fetched, slow, request.context - hit)
            if not fetched:
                self._prefill.append(request)
                continue
            rate = self.model.ssd_tokens_s if slow else self._store_tokens_s
            self._link_s = max(self._link_s, self.clock_s) + fetched / rate
            until_s = self._link_s + self.model.fetch_base_s
            request.fetch_s += until_s - self.clock_s
            self._arrives(until_s, self, request)

    def _find(self, request: AgentRequest) -> tuple[int, int, bool]:
        """Returns the tokens of a request's context in HBM, those in the store, and whether they lie on SSD."""
        most = min(request.cacheable, request.context - 1)
        here = min(self.cache.of(request.source), most) // BLOCK_TOKENS * BLOCK_TOKENS
        if self.store is None:
            return here, 0, False
        there, slow = self.store.find(request.source)
        self.store.use(request.source)
        return here, min(there, most) // BLOCK_TOKENS * BLOCK_TOKENS, slow

    def _decode(self, request: AgentRequest, now: float) -> None:
        request.begins(now)
        self._number += 1
        request.number, request.since = self._number, self._steps
        self._decoding += 1
        self._context += request.context
        heappush(self._ends, (self._steps + (request.tokens - 1) / self._made, self._number, request))

    def _end(self, request: AgentRequest) -> None:
        del self.running[request]
        self.load -= 1
        grown = (self._steps - request.since) * self._made
        self._decoding -= 1
        self._context -= request.context + grown
        self._held -= request.context + grown
        if not self.running:
            self._context = self._held = 0.0  # rests of added fractions
        request.ends()
        self.cache.put(request.line, request.context)
        if self.store is not None:
            self.store.put(request.line, request.context)

    def _fit(self) -> None:
        """Preempts the request admitted last until the running ones fit."""
        while self._held > self.model.hbm_tokens and len(self.running) > 1:
            request = next(reversed(self.running))
            del self.running[request]
            grown = (self._steps - request.since) * self._made if request.number else 0.0
            self._held -= request.context + grown
            if request.number:
                self._decoding -= 1
                self._context -= request.context + grown
            elif request in self._prefill:
                self._prefill.remove(request)
            request.preempted(int(grown))
            self.queue.appendleft(request)
        self.cache.shrink(int(self.model.hbm_tokens - self._held))

    # ---- time --------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Computes A, G and p of the steps from now on, and when they change."""
        step, model, n = self.model.step, self.model, self._decoding
        computed, growth = n * self._cost, n * self._made
        self._part = 0.0
        if not n and not self._prefill:
            self.due_s = inf
            return
        self._first_s = step.base_s + step.token_s * computed + step.context_s * self._context
        self._growth_s = step.context_s * growth
        until = inf
        while self._ends and self._ends[0][2].number != self._ends[0][1]:
            heappop(self._ends)
        if self._ends:
            until = max(0.0, self._ends[0][0] - self._steps)
        if self._prefill:
            head = self._prefill[0]
            part = self._part = max(1.0, model.step_tokens - computed)
            self._first_s += part * (step.token_s + model.attention_s * (head.context - head.left))
            self._growth_s += model.attention_s * part * part
            until = min(until, head.left / part)
        if n:  # a step at least, or until HBM is full
            until = min(until, max(1.0, (model.hbm_tokens - self._held) / growth + 1.0))
        self.due_s = self.clock_s + until * self._first_s + self._growth_s * until * until / 2

    def _advance(self, now: float) -> None:
        gone_s = now - self.clock_s
        self.clock_s = now
        if gone_s <= 0.0 or not (self._decoding or self._prefill):
            return
        steps = 2 * gone_s / (self._first_s + sqrt(self._first_s**2 + 2 * self._growth_s * gone_s))
        grown = steps * self._decoding * self._made
        self._steps += steps
        self._context += grown
        self._held += grown
        if self._part:
            head = self._prefill[0]
            head.left = max(0.0, head.left - steps * self._part)
            if head.left < 1e-3:
                head.left = 0.0
