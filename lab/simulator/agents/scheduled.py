"""Tailrace's router: `RolloutCore` with a policy for trajectories decides, as in the service.

A line of a session is a sample of the core; a turn that extends it is `SampleReturned`, a branch a sample that follows
another one. The core learns sizes of requests as they come, and stored tokens as turns end. Lines end with their
session: nobody knows before that a branch has taken a line's place, or that nothing will read a sub-agent's.
"""

from math import inf

from tailrace.lab.simulator.agents.request import AgentRequest
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import Action, ReleaseCause, ReleaseKv, StartChunk
from tailrace.policies.protocol.performance import Performance

BATCH, MAX_TOKENS = "agents", 1 << 16
"""Name of the one open batch, and maximum tokens of a turn, beyond any here."""

CHUNK_TOKENS = 512
"""Tokens of a chunk: longer than three turns in four, and little beside a context of 100,000."""

POLICIES = {
    "ordering": "fcfs",
    "placement": "cost_aware",
    "chunking": {"type": "fixed", "chunk_tokens": CHUNK_TOKENS},
    "drafting": "off",
    "prefetch": "off",
    "fairness": "one_queue",
    "trajectories": "by_kv",
}
BLOCK_TOKENS = 16


class Scheduled:
    """The router. `policies`: changes to POLICIES."""

    stores = "pool"

    def __init__(self, policies: dict | None = None):
        self._core = RolloutCore(Policies(**(POLICIES | (policies or {}))))
        self._samples: dict[object, str] = {}  # by line: its sample
        self._lines: dict[str, object] = {}
        self._contexts: dict[object, int] = {}
        self._asked: dict[str, AgentRequest] = {}  # by sample
        self._chunks: dict[AgentRequest, StartChunk] = {}
        self._begun: dict[object, list[object]] = {}  # by session: its lines
        self._news = self._wakes = False

    def begin(self, host) -> None:
        self._host, model = host, host.model
        for engine in host.engines:
            join = ev.ReplicaJoined(
                now=0.0,
                replica_id=str(engine.index),
                block_tokens=BLOCK_TOKENS,
                kv_capacity_blocks=int(model.hbm_tokens * 0.99) // BLOCK_TOKENS,
                max_running=1 << 20,
                draft_tokens=0,
                weights_version=0,
            )
            self._observe(join)
            step = model.step
            performance = Performance.linear(
                0.0,
                step.base_s,
                step.token_s + step.context_s * 128_000,
                prefill_token_s=step.token_s,
                fetch_base_s=model.fetch_base_s,
                fetch_token_s=1 / model.pool_tokens_s,
            )
            self._observe(ev.ReplicaMeasured(0.0, str(engine.index), performance))
        capacity = host.store.capacity if host.store is not None else 0
        self._observe(ev.PoolReported(0.0, capacity, 0, 0.0))
        self._observe(ev.SamplesSubmitted(0.0, BATCH, (), open=True))

    def _observe(self, event: ev.Event) -> None:
        self._core.observe(event)
        self._news = True

    def asks(self, request: AgentRequest) -> None:
        now, line, turn = self._host.now, request.line, request.turn
        if (sample_id := self._samples.get(line)) is not None:
            outside_tokens = turn.context - self._contexts[line]
            self._observe(ev.SampleReturned(now, sample_id, outside_tokens, MAX_TOKENS, inf))
        else:
            follows = self._samples.get(request.source)
            self._begun.setdefault(request.run, []).append(line)
            name = f"{request.run.number}.{turn.line}"
            spec = ev.GroupSpec(name, turn.context, 1, MAX_TOKENS, hold_s=inf, follows=follows)
            sample_id = self._samples[line] = f"{name}#0"
            self._lines[sample_id] = line
            self._observe(ev.SamplesSubmitted(now, BATCH, (spec,), open=True))
        self._asked[sample_id] = request

    def ended(self, request: AgentRequest, goes_on: bool) -> None:
        now, line = self._host.now, request.line
        chunk = self._chunks.pop(request)
        new_tokens = request.context - self._contexts[line]
        self._contexts[line] = request.context
        end = ev.ChunkEnd.LENGTH if goes_on else ev.ChunkEnd.STOP
        stored = min(self._host.stored(line), request.context)
        self._observe(ev.ChunkFinished(now, chunk.chunk_id, new_tokens, end, 0, stored))
        if not goes_on and request.turn.stop:
            self._observe(ev.ToolCalled(now, self._samples[line], request.turn.stop))
        if not request.run.left:
            for line in self._begun.pop(request.run):
                self._close(line)

    def _close(self, line: object) -> None:
        if (sample_id := self._samples.pop(line, None)) is not None:
            self._observe(ev.SampleCancelled(self._host.now, sample_id))
            self._contexts.pop(line)

    def tick(self) -> None:
        """Lets the core decide, after events or a second."""
        if self._news:
            self._news = False
            for action in self._core.decide(ev.Tick(self._host.now)):
                self._act(action)
            if self._core.counts()["waiting"] and not self._wakes:
                self._wakes = True
                self._host.at(self._host.now + 1.0, self._wake)

    def _wake(self) -> None:
        self._wakes, self._news = False, True

    def _act(self, action: Action) -> None:
        if isinstance(action, StartChunk):
            request = self._asked[action.sample_id]
            self._contexts[request.line] = request.context
            self._chunks[request] = action
            request.tokens = min(action.max_tokens, request.turn.out - request.made)
            self._host.submit(request, int(action.replica_id))
        elif isinstance(action, ReleaseKv) and action.sample_id is not None:
            if self._host.store is not None:
                self._host.store.drop(self._lines[action.sample_id])
            if action.cause is ReleaseCause.SUSPENDED:
                self._host.counts.suspended += 1
            else:
                del self._lines[action.sample_id]
