"""One modelled engine replica: its running chunks advance in closed form from one change of its batch to the next.

Continuous batching: every running chunk takes part in every step. With T tokens computed and C of context in the first
of k steps, and R tokens made in each, they take k * step(T, C) + context_s * R * k (k - 1) / 2. Chunks join and leave
between steps; a join with tokens to compute first delays all by tokens / prefill_tokens_s (chunked prefill shares the
steps). Without the core's reservations it does as vLLM does: first come, first served while the present context fits;
when KV runs full, the chunk admitted last gives up its KV and waits first. Driven by `Host` by way of `due_s`.
"""

from collections import deque
from heapq import heapify, heappop, heappush
from math import ceil, inf, sqrt

from tailrace.lab.simulator.chunks import ROUNDING, FreedKv, GroupProgress, SimulatedChunk
from tailrace.lab.simulator.speculation import FOREVER, Speculation
from tailrace.lab.simulator.types import ReplicaModel, Span
from tailrace.policies.protocol.performance import MethodAcceptance


class ModelledReplica:
    """`clock_s`: the time at which virtual step `step` begins; everything else is as of then.

    Invariant: `turn` is called at `due_s`, neither earlier nor later; `submit` and `abort` at any time before.
    """

    def __init__(self, model: ReplicaModel, index: int, speculation: Speculation, spans: list[Span] | None = None):
        self.model, self.index, self._speculation, self._spans = model, index, speculation, spans
        self.methods = speculation.methods
        self.clock_s, self.step, self.due_s = 0.0, 0, inf
        self.running: dict[str, SimulatedChunk] = {}  # in order of admission
        self.waiting: deque[SimulatedChunk] = deque()
        self.prompts: set[GroupProgress] = set()  # whose prompt it has computed: mates share its KV
        self.context = 0.0  # tokens of KV that running chunks hold
        self._written = 0.0  # all tokens of KV ever written, each over the KV freed earliest
        self._made, self._computed = 0.0, 0.0  # tokens per step of all running chunks
        self._rate, self._cost, self._part, self._tests = 1.0, 1.0, 1.0, 0.0  # the present pace, for one that joins
        self._floor_s, self._added_s, self._reads = 0.0, 0.0, 1.0  # and for all: `reads` is the share of context read
        self._first_s, self._growth_s = 0.0, 0.0  # seconds of the next step, and by how much each one is longer
        self._share = 1.0  # of the model's time that a step takes
        self._ends: list[tuple[int, int, SimulatedChunk]] = []  # (end step, serial, chunk), dead entries among them
        self._due_step, self._until, self._changes, self._serial = 0, FOREVER, 0, 0
        self._aborted: list[SimulatedChunk] = []

    # ---- calls of the host --------------------------------------------------------------------------

    def submit(self, chunk: SimulatedChunk, now: float) -> None:
        """Adds a chunk, which joins after the step that runs at `now`, or when there is room."""
        self.waiting.append(chunk)
        self._wake(now)

    def abort(self, chunk: SimulatedChunk, now: float) -> None:
        """Stops a chunk, here or on its way, after the step that runs at `now`; its whole tokens so far are good."""
        chunk.aborted = True
        self._aborted.append(chunk)
        self._wake(now)

    def take(self, share: float, now: float) -> None:
        """Lets steps take this share of the model's time, from the one after that which runs at `now`."""
        if share != self._share:
            self._share = share
            if self.running:
                self._wake(now)

    def drop_kv(self) -> None:
        """Drops all KV, as a replica that stops: one that starts in its place finds none."""
        self.prompts.clear()
        self._written += self.model.kv_capacity_tokens

    def turn(self) -> list[SimulatedChunk]:
        """Takes the turn at `due_s`: chunks that have ended leave and are returned, room is made, others join; then
        `due_s` is new.
        """
        self._advance()
        ended = self._leave()
        if not self._make_room():
            self._admit()
        if self.step >= self._until or self._speculation.stale(self._changes, len(self.running)):
            self._repace()
        self._plan()
        return ended

    # ---- questions -------------------------------------------------------------------------------------

    def context_at(self, now: float) -> float:
        """Returns the tokens of KV that running chunks hold after the step that runs at `now`."""
        return self.context + self._made * self._steps_until(now)

    def made_at(self, chunk: SimulatedChunk, now: float) -> int:
        """Returns the tokens that a chunk has made in the steps that are over by then."""
        steps = self.step - chunk.since + max(0, self._steps_until(now) - 1) if chunk.running else 0
        return min(int(chunk.made + chunk.rate * steps), chunk.tokens)

    def cached(self, context: float, freed_kv: FreedKv | None, now: float) -> int:
        """Returns the tokens of a context freed here whose KV is not overwritten by then: the KV freed earliest goes
        first, and of one context its end (vLLM's free queue; KV that others take up again is not counted).
        """
        if freed_kv is None or freed_kv.replica != self.index:
            return 0
        written = self._written + self._made * self._steps_until(now) - freed_kv.written
        return max(0, int(context - max(0.0, written - freed_kv.slack)))

    def boundary_s(self, now: float) -> float:
        """Returns the time at which the step that runs at `now` is over; `now` if none does."""
        steps = self._steps_until(now)
        return max(now, self.clock_s + steps * self._first_s + self._growth_s * (steps * (steps - 1) / 2))

    def step_s(self) -> float:
        """Returns the seconds of the next step; 0 while nothing runs."""
        return self._first_s if self.running else 0.0

    def lately(self) -> tuple[float, float]:
        """Returns the mean draft tokens of a chunk in a step, and the tokens that it makes; none and one while nothing
        runs.
        """
        chunks = len(self.running)
        if not chunks:
            return 0.0, 1.0
        return max(0.0, self._computed / chunks - self._part), max(1.0, self._made / chunks)

    def acceptance(self) -> tuple[MethodAcceptance, ...]:
        """Returns the draft tokens that were tested, by method."""
        return self._speculation.acceptance()

    # ---- a turn ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        tokens = self._made * (self._due_step - self.step)
        self.clock_s, self.step = self.due_s, self._due_step
        self.context += tokens
        self._written += tokens

    def _leave(self) -> list[SimulatedChunk]:
        ended, self._aborted = self._aborted, []
        for chunk in ended:
            if chunk.running:
                self._stop(chunk)
            elif chunk in self.waiting:
                self.waiting.remove(chunk)
        while (end := self._next_end()) is not None and end.end_step <= self.step:
            self._stop(end)
            end.made = end.tokens
            ended.append(end)
        return ended

    def _stop(self, chunk: SimulatedChunk) -> None:
        """Takes a chunk off, for good or for a while; its tokens are whole from now on."""
        del self.running[chunk.chunk_id]
        chunk.settle(self.step)
        self.context -= chunk.context + chunk.made
        self._made -= chunk.rate
        self._computed -= chunk.cost
        if not self.running:
            self.context = self._made = self._computed = 0.0  # rests of added fractions
        chunk.made = min(float(int(chunk.made + ROUNDING)), float(chunk.tokens))
        held = chunk.context + chunk.made
        chunk.freed_kv = FreedKv(
            self.index, self._written, max(0.0, self.model.kv_capacity_tokens - self.context - held)
        )
        chunk.running = False
        self._changes += 1
        self._speculation.drop(chunk)
        if self._spans is not None:
            role = "generate" if chunk.method is None else "race"
            self._note(chunk, role, chunk.begin_s, chunk.made - chunk.begin_made, self.step - chunk.begin_step)

    def _make_room(self) -> bool:
        """Preempts until the next step fits. Returns whether any chunk was."""
        room = self.model.kv_capacity_tokens + ROUNDING
        before = len(self.waiting)
        while self.context + self._made > room and len(self.running) > 1:
            chunk = next(reversed(self.running.values()))
            self._stop(chunk)
            chunk.sample.preemptions += 1
            self.waiting.appendleft(chunk)
        return len(self.waiting) > before

    def _admit(self) -> None:
        """Admits the chunks at the head of the queue whose context fits with one more step of all."""
        model = self.model
        while self.waiting and len(self.running) < model.max_running:
            chunk = self.waiting[0]
            held = chunk.context + chunk.made
            if self.running and self.context + held + self._made + self._rate > model.kv_capacity_tokens + ROUNDING:
                return
            self._join(self.waiting.popleft(), held)

    def _join(self, chunk: SimulatedChunk, held: float) -> None:
        sample = chunk.sample
        if not sample.begun:
            sample.begun = True
            sample.progress.begun += 1
        if chunk.freed_kv is not None:  # it was preempted
            chunk.prefill, chunk.pulled = int(held) - self.cached(held, chunk.freed_kv, self.clock_s), 0
            sample.recomputed += chunk.prefill
        elif sample.chunks > 1:
            self.clock_s += self.model.join_s
        if chunk.prefill:
            began_s = self.clock_s
            self.clock_s += chunk.prefill / self.model.prefill_tokens_s
            if self._spans is not None:
                self._note(chunk, "prefill", began_s, chunk.prefill, 0)
        self._serial += 1
        chunk.running, chunk.serial, chunk.since = True, self._serial, self.step
        chunk.begin_s, chunk.begin_step, chunk.begin_made = self.clock_s, self.step, int(chunk.made)
        chunk.pace(self._rate, self._cost, self._part, self._tests)
        heappush(self._ends, (chunk.end_step, chunk.serial, chunk))
        self.running[chunk.chunk_id] = chunk
        self.context += held
        self._written += chunk.prefill + chunk.pulled
        self._made += chunk.rate
        self._computed += chunk.cost
        self._changes += 1

    def _repace(self) -> None:
        self._changes, self._until = 0, FOREVER
        chunks = list(self.running.values())
        if not chunks:
            return
        for chunk in chunks:
            chunk.settle(self.step)
        pace = self._speculation.pace(chunks, self.context)
        parts = pace.parts or [1.0] * len(chunks)
        tested = pace.tested or [0.0] * len(chunks)
        for chunk, rate, cost, part, tests in zip(chunks, pace.rates, pace.costs, parts, tested, strict=True):
            chunk.pace(rate, cost, part, tests)
        self._ends = [(chunk.end_step, chunk.serial, chunk) for chunk in chunks]
        heapify(self._ends)
        self._made, self._computed = sum(pace.rates), sum(pace.costs)
        self._rate, self._cost = self._made / len(chunks), self._computed / len(chunks)
        self._part, self._reads, self._tests = sum(parts) / len(chunks), 1.0, sum(tested) / len(chunks)
        if pace.parts:
            self._reads = sum(chunk.part * (chunk.context + chunk.made) for chunk in chunks) / self.context
        self._floor_s, self._added_s, self._until = pace.floor_s, pace.added_s, self.step + pace.steps

    # ---- the clock -----------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Sets `due_s`: when the next chunk ends, KV runs full, or the pace ends."""
        if not self.running:
            self.due_s = inf
            return
        step = self.model.step
        self._first_s = step.seconds(self._computed, self._reads * self.context) + self._added_s
        self._growth_s = step.context_s * self._reads * self._made
        if self._first_s < self._floor_s:
            self._first_s, self._growth_s = self._floor_s, 0.0
        self._first_s *= self._share
        self._growth_s *= self._share
        due = min(self._next_end().end_step, self._until)
        if len(self.running) > 1:
            due = min(due, self.step + int((self.model.kv_capacity_tokens - self.context + ROUNDING) / self._made))
        self._due(due)

    def _wake(self, now: float) -> None:
        if not self.running:
            self.clock_s = max(self.clock_s, now)
            self._due(self.step)
        else:
            self._due(self.step + self._steps_until(now))
            self.due_s = max(self.due_s, now)  # a boundary just before `now`, by rounding, is one at `now`

    def _due(self, step: int) -> None:
        steps = step - self.step
        self._due_step = step
        self.due_s = self.clock_s + steps * self._first_s + self._growth_s * (steps * (steps - 1) / 2)

    def _steps_until(self, now: float) -> int:
        """Returns the steps, from `step` on, after which the one that runs at `now` is over: the smallest k of which k
        * first + growth * k (k - 1) / 2 reaches the time gone, and not beyond the next turn.
        """
        gone_s = now - self.clock_s
        if gone_s <= 0.0 or not self.running:
            return 0
        linear = self._first_s - self._growth_s / 2
        steps = 2 * gone_s / (linear + sqrt(linear * linear + 2 * self._growth_s * gone_s))
        return min(ceil(steps - ROUNDING), self._due_step - self.step)

    def _next_end(self) -> SimulatedChunk | None:
        while self._ends:
            _, serial, chunk = self._ends[0]
            if chunk.running and chunk.serial == serial:
                return chunk
            heappop(self._ends)
        return None

    def _note(self, chunk: SimulatedChunk, role: str, begin_s: float, tokens: float, steps: int) -> None:
        self._spans.append(
            Span(
                replica=self.index,
                sample_id=chunk.sample.sample_id,
                role=role,
                begin_s=begin_s,
                end_s=self.clock_s,
                tokens=int(tokens),
                verifications=steps,
            )
        )
