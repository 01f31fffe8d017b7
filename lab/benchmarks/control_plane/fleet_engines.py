"""Modelled engines of `tailrace bench fleet`, a few hundred in a process, each on a real line to the coordinator.

A token takes a fixed time, whatever else runs. Results and reports are those of a real engine in kind and in size. The
process reads commands from a pipe: open a line, count, end. Called by lab/benchmarks/control_plane/fleet.py.
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from multiprocessing.connection import Connection

import numpy as np
from ray._private.async_compat import get_new_event_loop

from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.channel.engine_line import EngineLine
from tailrace.deployments.channel.sockets import DialledSocket
from tailrace.deployments.messages.chunk import STEP_BOUNDS_S, ChunkRequest, ChunkResult, EngineStats
from tailrace.lab.benchmarks.control_plane.fleet_load import MAX_TOKENS, Age, LoadPiece, piece
from tailrace.policies.protocol.events import ChunkEnd

BLOCK_TOKENS = 16
DIGEST = "modelled"
NODE_REPLICAS = 2

TOKENS = np.arange(MAX_TOKENS, dtype=np.int32) + 100_000
LOGPROBS = -np.linspace(0.01, 3.0, MAX_TOKENS, dtype=np.float32)


NO_LATER_STEPS = (0,) * (len(STEP_BOUNDS_S) - 3)


@dataclass(slots=True)
class ModelledChunk:
    """A running chunk, which has made its first `piece.at_once` tokens at `began_s`."""

    request: ChunkRequest
    piece: LoadPiece
    began_s: float
    answer: asyncio.Future

    def tokens(self, now_s: float, tokens_per_s: float) -> int:
        return min(self.piece.tokens, self.piece.at_once + int((now_s - self.began_s) * tokens_per_s))


class ModelledEngine:
    """A modelled engine, in which each running sample makes `tokens_per_s` tokens per second. `late`: called with the
    seconds by which a chunk's end was late.
    """

    def __init__(self, replica_id: str, running: int, tokens_per_s: float, late: Callable[[float], None]):
        self._loop, self._tokens_per_s, self._late = asyncio.get_running_loop(), tokens_per_s, late
        self._chunks: dict[str, ModelledChunk] = {}
        self._ends: list[tuple[float, str]] = []  # times and chunk ids
        self._timer: asyncio.TimerHandle | None = None
        self.line: EngineLine | None = None
        self.reports = self.ended = 0
        self._constant = {
            "replica_id": replica_id,
            "weights_version": 0,
            "weights_digest": DIGEST,
            "block_tokens": BLOCK_TOKENS,
            "kv_capacity_blocks": running * 2 * MAX_TOKENS // BLOCK_TOKENS,
            "max_running": running,
            "max_model_len": 2 * MAX_TOKENS,
            "draft_tokens": 0,
            "node_id": f"node-{int(replica_id[1:]) // NODE_REPLICAS}",
            "started_at": time.time(),
            "methods": ("index",),
        }

    async def generate_chunk(self, chunk: ChunkRequest) -> ChunkResult:
        done = len(chunk.token_ids) - chunk.prompt_tokens
        part = piece(chunk.sample_key, Age.of(chunk.token_ids), done, chunk.max_tokens)
        now_s = self._loop.time()
        running = ModelledChunk(chunk, part, now_s, self._loop.create_future())
        self._chunks[chunk.chunk_id] = running
        heappush(self._ends, (now_s + (part.tokens - part.at_once) / self._tokens_per_s, chunk.chunk_id))
        self._arm()
        try:
            return await running.answer
        finally:
            del self._chunks[chunk.chunk_id]

    async def abort(self, chunk_id: str, keep_kv: bool) -> None:
        if (running := self._chunks.get(chunk_id)) is not None and not running.answer.done():
            made = running.tokens(self._loop.time(), self._tokens_per_s)
            running.answer.set_result(_result(running.request, made, ChunkEnd.ABORTED))

    async def stats(self) -> EngineStats:
        self.reports += 1
        now_s, rate = self._loop.time(), self._tokens_per_s
        running = {chunk_id: chunk.tokens(now_s, rate) for chunk_id, chunk in self._chunks.items()}
        steps = int(now_s * rate)
        tokens = steps * len(running)
        work = {"steps": steps, "step_us": int(now_s * 1e6), "tokens": tokens, "verifications": tokens}
        counts = (0, 0, 0, steps, *NO_LATER_STEPS)
        return EngineStats(**self._constant, observed_at=time.time(), running=running, work=work, step_counts=counts)

    def _arm(self) -> None:
        """Sets the one timer to the next end of a chunk."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._ends[0][0], self._end_due) if self._ends else None

    def _end_due(self) -> None:
        now_s = self._loop.time()
        while self._ends and self._ends[0][0] <= now_s:
            due_s, chunk_id = heappop(self._ends)
            running = self._chunks.get(chunk_id)
            if running is None or running.answer.done():
                continue
            self.ended += 1
            if running.piece.at_once < running.piece.tokens:
                self._late(now_s - due_s)
            end = ChunkEnd.STOP if running.piece.stops else ChunkEnd.LENGTH
            end = ChunkEnd.ABORTED if running.piece.early else end
            running.answer.set_result(_result(running.request, running.piece.tokens, end))
        self._timer = None
        self._arm()


def _result(chunk: ChunkRequest, tokens: int, end: ChunkEnd) -> ChunkResult:
    """Returns a chunk's result. Its `queue_s` is the time at which it is made, by the monotonic clock that all
    processes of a host share.
    """
    return ChunkResult(
        chunk_id=chunk.chunk_id,
        token_ids=TOKENS[:tokens],
        logprobs=LOGPROBS[:tokens],
        raw_logprobs=LOGPROBS[:tokens],
        end=end,
        weights_version=chunk.weights_version,
        queue_s=time.monotonic(),
        prefill_s=0.0,
        decode_s=0.0,
        cached_tokens=0,
        computed_tokens=len(chunk.token_ids),
        verifications=tokens,
    )


class EngineHost:
    """The engines of one process."""

    def __init__(self, names: list[str], running: int, tokens_per_s: float, pipe: Connection):
        self._late_s, self._pipe, self.ended = array("d"), pipe, asyncio.Event()
        self._engines = {name: ModelledEngine(name, running, tokens_per_s, self._late_s.append) for name in names}
        self._holds: set[asyncio.Task] = set()
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._obey)

    def _obey(self) -> None:
        try:
            while self._pipe.poll():
                command, *args = self._pipe.recv()
                {"open": self._open, "count": self._count, "end": self.ended.set}[command](*args)
        except (EOFError, OSError):  # the coordinator's process has ended
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self.ended.set()

    def _open(self, name: str, address: Address, session: str) -> None:
        engine = self._engines[name]
        engine.line = EngineLine(session, engine, partial(DialledSocket, address, session))
        hold = asyncio.ensure_future(engine.line.hold())
        self._holds.add(hold)
        hold.add_done_callback(self._holds.discard)

    def _count(self) -> None:
        """Sends reports and processor seconds so far, the seconds by which chunks' ends were late since the last count,
        and the number of lines that have ended.
        """
        reports = sum(engine.reports for engine in self._engines.values())
        left = sum(engine.line is not None for engine in self._engines.values()) - len(self._holds)
        self._pipe.send((reports, time.process_time(), self._late_s.tolist(), left))
        del self._late_s[:]


def host(names: list[str], running: int, tokens_per_s: float, pipe: Connection) -> None:
    """Runs the engines of a process until the pipe says to end, or is closed."""

    async def live() -> None:
        await EngineHost(names, running, tokens_per_s, pipe).ended.wait()

    with asyncio.Runner(loop_factory=get_new_event_loop) as runner:
        runner.run(live())
