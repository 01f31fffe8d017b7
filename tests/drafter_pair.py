"""Stand-ins for an engine and a draft model, with all between them that is real: lines, messages, sessions, windows.

Time is counted in steps of the engine, and a drafter computes so many tokens in each: what a test is about is forced,
and no pace of a machine is in it. What a sample writes is a function of the position alone.
"""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import zmq
from test_drafter_wire import Clock

from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.draft_index.proposal import accepted_tokens
from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.drafter.sessions import Sessions
from tailrace.deployments.drafter.wire import Confirm, Open, Unknown, decode, encode
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.pause import is_paused
from tailrace.policies.families.drafting import FixedBudget
from tailrace.policies.protocol.actions import DraftMode

BLOCK_TOKENS = 32
PROMPT_TOKENS, END = 8, 1_000_000
STEP_S, WAIT_S = 0.1, 0.01


def token(position: int) -> int:
    return 1000 + position


def context(tokens: int) -> list[int]:
    return [token(position) for position in range(tokens)]


@dataclass
class Request:
    request_id: str
    tokens: list[int]
    computed: int
    num_output_tokens: int = 0
    next_decode_eligible_step: int = 0

    def is_finished(self) -> bool:
        return False


@dataclass
class Model:
    """A draft model, that is vLLM's engine and its requests: `pace` tokens a step; whole blocks stay in its cache."""

    pace: int
    kv_blocks: int = 10_000
    block_tokens: int = BLOCK_TOKENS
    running: dict[str, Request] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)  # tokens, by sample
    added: int = 0

    def refusal(self, chunk) -> None:
        return None

    def add(self, name: str, chunk, tokens: np.ndarray, most: int, kv) -> Request:
        self.added += 1
        whole = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        request = Request(name, tokens.tolist(), min(whole, self.cached.get(sample_of(name), 0)))
        self.running[name] = request
        return request

    def abort(self, request_id: str) -> None:
        request = self.running.pop(request_id)
        self.cached[sample_of(request_id)] = request.computed // BLOCK_TOKENS * BLOCK_TOKENS

    def step(self) -> list:
        budget, outputs = self.pace, []
        for request in [one for one in self.running.values() if not is_paused(one)]:
            count = min(budget, len(request.tokens) - request.computed)
            request.computed += count
            budget -= count
            if count and request.computed == len(request.tokens):
                request.tokens.append(token(len(request.tokens)))
                request.num_output_tokens += 1
                made = SimpleNamespace(token_ids=request.tokens[-1:])
                outputs.append(SimpleNamespace(request_id=request.request_id, outputs=[made], finished=False))
        return outputs

    def collective_rpc(self, *_args, **_more) -> None:
        pass


def sample_of(name: str) -> str:
    """Of the name of a request: `NUMBER GROUP#INDEX:CHUNK`, and perhaps more."""
    return name.split()[1].rpartition(":")[0]


class Wire:
    """Both ends of a socket, which brings everything at once."""

    def __init__(self):
        self.there, self.here = deque(), deque()

    def send(self, frame: bytes, _flags) -> None:
        self.there.append(frame)

    def recv(self, _flags) -> bytes:
        if not self.here:
            raise zmq.Again
        return self.here.popleft()

    def close(self, linger: int) -> None:
        self.there.clear()
        self.here.clear()


class Wired(Drafters):
    """Drafters on such a wire."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.wire = Wire()

    def _connect(self, address: Address) -> Wire:
        return self.wire


class Pair:
    """An engine's Drafters, and the Sessions at the other end; each step of the engine is `steps` of the drafter."""

    def __init__(self, pace: int, steps: int = 4, coupled: bool = False, kv_blocks: int = 10_000):
        self.clock, self.mode, self.address = Clock(), DraftMode(4, coupled), Address("tcp://here:1", b"")
        self.drafters = Wired(DrafterConfig(model="m"), self.clock)
        self.model, self.steps = Model(pace, kv_blocks), steps
        self.sessions = Sessions(self.model, self.model, 1_000_000)
        self.chunks: dict[str, ChunkRequest] = {}
        self.made: dict[str, int] = {}  # tokens of the context, by chunk
        self.accepted: dict[str, int] = {}  # draft tokens, by chunk
        self.drafters.meet([self.address])
        self.drafters.exchange()

    def start(self, known: int, max_tokens: int, index: int = 0, mode: DraftMode | None = None, most: int = END) -> str:
        """A chunk of a sample that has `known` tokens of context."""
        plan = DraftPlan(GroupRef("g", "key"), index, 0, 60, (0, 0), FixedBudget(tokens=4), most_tokens=most)
        chunk_id, tokens = f"g#{index}:{known}", np.array(context(known), np.int32)
        chunk = ChunkRequest(chunk_id, 7, tokens, PROMPT_TOKENS, max_tokens, SamplingParams(), 0, draft=plan)
        self.chunks[chunk_id], self.made[chunk_id], self.accepted[chunk_id] = chunk, known, 0
        self.drafters.open(chunk, mode or self.mode)
        return chunk_id

    def run(self, known: int, max_tokens: int, **more) -> int:
        """Such a chunk, to its end; draft tokens that it accepted."""
        chunk_id = self.start(known, max_tokens, **more)
        while chunk_id in self.chunks:
            self.step()
        return self.accepted[chunk_id]

    def step(self) -> None:
        """One of the engine: a sample that waits for its drafter sits it out."""
        waiting = {chunk_id for chunk_id in self.chunks if self.drafters.waits(chunk_id)}
        self.clock.now_s += WAIT_S if len(waiting) == len(self.chunks) else STEP_S
        for chunk_id in [one for one in self.chunks if one not in waiting]:
            self._verify(chunk_id)
        self.drafters.exchange()
        for _ in range(self.steps if len(waiting) < len(self.chunks) else 1):
            self.draft()
        self.drafters.exchange()

    def _verify(self, chunk_id: str) -> None:
        chunk, at = self.chunks[chunk_id], self.made[chunk_id]
        end = len(chunk.token_ids) + chunk.max_tokens
        draft = self.drafters.proposal(chunk_id).tokens.tolist()[: max(0, end - at - 1)]
        right = accepted_tokens(draft, context(at + len(draft))[at:])
        assert right == len(draft), "the model knows what comes"
        self.accepted[chunk_id] += right
        self.made[chunk_id] += right + 1
        self.drafters.made(chunk_id, [token(at + place) for place in range(right + 1)])
        if self.made[chunk_id] == end:
            self.end(chunk_id, goes_on=True)

    def end(self, chunk_id: str, goes_on: bool) -> None:
        del self.chunks[chunk_id]
        self.drafters.close(chunk_id, goes_on)

    def draft(self) -> None:
        """One step of the drafter, with what it has heard."""
        self.hear_all()
        if self.sessions.busy:
            self.say([guess for _, guess in self.sessions.step()])

    def say(self, messages: list) -> None:
        self.drafters.wire.here.append(encode(messages))

    def hear_all(self) -> dict[str, int]:
        """Counts of the drafter, once it has heard all that was said."""
        while self.drafters.wire.there:
            for message in decode(self.drafters.wire.there.popleft()):
                self._obey(message)
        return self.sessions.counts()

    def _obey(self, message) -> None:
        match message:
            case Open():
                self.sessions.open("engine", message)
            case Confirm(name):
                try:
                    self.sessions.confirm("engine", message)
                except KeyError:
                    self.say([Unknown(name)])
            case _:
                self.sessions.stop("engine", message.name)
