"""A simulated vLLM engine, by the stepper's interface: tokens are a function of key, weights and position.

Invariant: `token_at` alone decides a token, so that a wrong one shows at once.
"""

from collections import Counter
from collections.abc import Callable
from itertools import islice, takewhile

import numpy as np

from tailrace.deployments.engine.suspects import Suspects
from tailrace.deployments.messages.adapters import digest_of as digest_of_adapter
from tailrace.deployments.messages.chunk import (
    TAGS,
    WEIGHTS,
    ChunkRequest,
    ChunkResult,
    EngineStats,
    WeightsRead,
)
from tailrace.deployments.messages.errors import RequestRefused
from tailrace.deployments.messages.scores import SCORED, Score, apart
from tailrace.lab.fuzz.actors import SimulatedMaster
from tailrace.lab.fuzz.chunks import (
    BLOCK_TOKENS,
    KEY_PREFIX,
    Blocks,
    RunningChunk,
    block_names,
    pool_key,
    reserved_blocks,
    result_of,
)
from tailrace.lab.fuzz.disk import Disk, SimulatedAdapters, adapted, digest_of
from tailrace.lab.fuzz.odd.culprits import RAISED, REFUSED, Culprits
from tailrace.lab.fuzz.token_law import EOS, TokenLaw
from tailrace.policies.models.hashed_random import fraction
from tailrace.policies.protocol.events import ChunkEnd
from tailrace.policies.protocol.performance import Performance

MIXED = "mixed"
"""Content that stands for the weights of a chunk that has read KV of another content."""


def score_of(content: str) -> Score:
    """Returns the score of weights of this content."""
    return tuple(-20 * fraction(place, content) for place in SCORED[1:])


class SimulatedWeights:
    """The weights of one engine: the content of a folder of its host's disk. `running`, `blocks`: its chunks and KV."""

    def __init__(self, disk: Disk, running: dict[str, "RunningChunk"], blocks: Blocks):
        self._disk, self._running, self._blocks = disk, running, blocks
        self.version, self.source, self.asleep = 0, "", ()
        self.scored, self.drift = (), 0.0
        self._take(disk.read("start"))
        self.score(None)
        self.had = {(0, self.digest)}  # weights by version and digest

    def _take(self, content: str) -> None:
        self.content, self.digest = content, digest_of(content)

    def load(self, version: int, source: str, digest: str) -> None:
        if self._running:
            raise RuntimeError(f"weights cannot change while {len(self._running)} chunks run")
        content = self._disk.read(source or "start")
        if digest_of(content) != digest != "":
            raise ValueError(f"weights folder {source}: holds {content}, not {digest}")
        self._take(content)
        self.version, self.source = version, source
        self.had.add((version, self.digest))
        self.asleep = tuple(tag for tag in self.asleep if tag != WEIGHTS)

    def score(self, steps: "SimulatedStepper") -> None:
        self.scored = () if self.asleep else score_of(self.content)

    def score_again(self, steps: "SimulatedStepper") -> None:
        self.drift = apart(self.scored, score_of(self.content)) if self.scored and not self.asleep else 0.0

    def refusal(self, source: str) -> str | None:
        try:
            self._disk.read(source)
        except ValueError as error:
            return str(error)
        return None

    def fall_asleep(self) -> None:
        if digest_of(self._disk.read(self.source or "start")) != self.digest:
            raise ValueError(f"weights folder {self.source}: holds other weights now, which could not come back")
        self._blocks.clear()
        self.asleep = TAGS

    def wake_kv(self) -> None:
        self.asleep = tuple(tag for tag in self.asleep if tag == WEIGHTS)

    def read_back(self) -> WeightsRead:
        return WeightsRead(self.version, self.digest, {"w": self.content}, unlike=())

    def transfer(self, transfer) -> str:
        raise ValueError("a simulated engine has no transfer engine of vLLM")


class SimulatedStepper:
    """One engine. `step_tokens`: number of tokens that a step makes of each chunk."""

    def __init__(
        self,
        replica_id: str,
        disk: Disk,
        law: TokenLaw,
        step_tokens: int,
        kv_capacity_blocks: int,
        pool: SimulatedMaster | None,
        now: Callable[[], float],
        culprits: Culprits,
    ):
        self.disk, self._now, self._culprits = disk, now, culprits
        self._law, self._step_tokens = law, step_tokens
        self._pool, self._written = (pool.keys, pool.written) if pool is not None else (None, set())
        self.adapters = SimulatedAdapters(disk)
        self._running: dict[str, RunningChunk] = {}
        self._ended: list[tuple[str, ChunkResult | Exception]] = []
        self._blocks = Blocks(kv_capacity_blocks)
        self.weights = SimulatedWeights(disk, self._running, self._blocks)
        self._steps = self._made = 0
        self._kv_counts: Counter[str] = Counter()
        self.progress_s = 0.0
        self._constant = {
            "replica_id": replica_id,
            "block_tokens": BLOCK_TOKENS,
            "kv_capacity_blocks": kv_capacity_blocks,
            "max_running": 8,
            "max_model_len": 512,
            "draft_tokens": 0,
        }
        self.most_blocks = 0  # that running chunks have reserved at once
        self.refuses = ""  # why chunks are refused; a fault sets it
        self._swallowed: set[str] = set()  # chunks that run and make no token
        self._suspects = Suspects()
        self.broken = self.hiccup = False  # every step raises; the next one does
        self.longest_wait_steps = 0  # of a chunk, for the search of a culprit

    busy = property(lambda self: bool(self._running or self._ended))

    @property
    def sample_keys(self) -> list[int]:
        return sorted(running.chunk.sample_key for running in self._running.values())

    def add(self, chunk: ChunkRequest, submitted_s: float) -> None:
        if self.refuses:
            raise ValueError(f"chunk {chunk.chunk_id}: {self.refuses}")
        if self.weights.asleep:
            raise ValueError(f"chunk {chunk.chunk_id}: this engine sleeps")
        if chunk.chunk_id in self._running:
            raise ValueError(f"chunk {chunk.chunk_id}: already running here")
        if chunk.weights_version != self.weights.version:
            wanted, here = chunk.weights_version, self.weights.version
            raise ValueError(f"chunk {chunk.chunk_id}: wants weights {wanted}, this is {here}")
        if chunk.weights_digest not in ("", self.weights.digest):
            wanted, here = chunk.weights_digest, self.weights.digest
            raise ValueError(f"chunk {chunk.chunk_id}: wants weights {wanted}, this is {here}")
        if chunk.adapter is not None:
            self.adapters.take(chunk.adapter)
        key = chunk.sample_key
        if self._culprits.refuses(key, len(chunk.token_ids)):
            self._culprits.end(chunk)
            raise RequestRefused(f"chunk {chunk.chunk_id}: {REFUSED}")
        self._running[chunk.chunk_id] = RunningChunk(
            chunk=chunk,
            content=self._content_of(chunk),
            law=self._law,
            attempt=f"{self._constant['replica_id']}/{chunk.chunk_id}",
            cached_tokens=self._cached_tokens(chunk),
            raises_at=self._culprits.raises_at(key),
        )
        self._suspects.join(chunk.chunk_id)
        self.most_blocks = max(
            self.most_blocks, reserved_blocks(self._running.values(), self._constant["draft_tokens"])
        )

    def offer(self, methods: tuple[str, ...], draft_tokens: int) -> None:
        """Offers these draft methods, the default first, with look-ahead of `draft_tokens`."""
        self._constant |= {"methods": methods, "draft_tokens": draft_tokens}

    def _content_of(self, chunk: ChunkRequest) -> str:
        """Returns the content of weights and adapter, or MIXED if KV from the pool, of the same version, was written by
        another."""
        own = adapted(self.weights.content, digest_of_adapter(chunk.adapter))
        if self._pool is None or chunk.kv is None or chunk.kv.version != self.weights.version:
            return own
        names = block_names(chunk, chunk.token_ids)
        return own if {self._pool.get(pool_key(name), own) for name in names} <= {own} else MIXED

    def _cached_tokens(self, chunk: ChunkRequest) -> int:
        """Returns the number of tokens of a context whose whole blocks are here or in the pool; the last token is
        always computed."""
        names = block_names(chunk, chunk.token_ids[:-1])
        pulls = self._pool if chunk.kv is not None and chunk.kv.min_pull_tokens is not None else None
        found = takewhile(lambda name: name in self._blocks or pool_key(name) in (pulls or ()), names)
        return BLOCK_TOKENS * sum(1 for _ in found)

    def peek(self, chunk_id: str) -> np.ndarray:
        running = self._running.get(chunk_id)
        return np.array(running.tokens if running else (), np.int32)

    def abort(self, chunk_id: str, keep_kv: bool) -> None:
        if chunk_id in self._running:
            self._finish(chunk_id, ChunkEnd.ABORTED)

    def swallow(self, number: int) -> None:
        """Stops the tokens of a running chunk; the others continue."""
        if self._running:
            self._swallowed.add(sorted(self._running)[number % len(self._running)])

    def step(self) -> list[tuple[str, ChunkResult | Exception]]:
        self._steps += 1
        names = list(self._running) if self._suspects.quiet else self._tried()
        going = {name: self._running[name] for name in names if name not in self._swallowed}
        if self._raises(going):
            self._search(going)
        else:
            for chunk_id, running in going.items():
                self._decode(chunk_id, running)
        self.progress_s = self._now()
        ended, self._ended = self._ended, []
        return ended

    def _tried(self) -> list[str]:
        """Returns the chunks of this step, while others wait for the search of a culprit."""
        names = self._suspects.running()
        for chunk_id, running in self._running.items():
            waits = not (chunk_id in names or self._swallowed)  # a chunk on trial that hangs holds all others
            running.waited_steps = running.waited_steps + 1 if waits else 0
            self.longest_wait_steps = max(self.longest_wait_steps, running.waited_steps)
        return names

    def _raises(self, going: dict[str, RunningChunk]) -> bool:
        """Returns whether a step with these chunks raises. It then makes no token of any."""
        hiccup, self.hiccup = self.hiccup, False
        heavy = sum(1 for running in going.values() if self._culprits.is_heavy(running.chunk.sample_key))
        fatal = any(running.is_fatal(self._step_tokens) for running in going.values())
        return bool(going) and (hiccup or self.broken or fatal or heavy > 1)

    def _search(self, going: dict[str, RunningChunk]) -> None:
        """Records that a step has raised: the next one tries fewer chunks, or one chunk is to blame. Raises
        RuntimeError if the engine itself is broken."""
        self._blocks.clear()
        blamed = self._suspects.raised({name: running.possible(self._step_tokens) for name, running in going.items()})
        if blamed is None:
            return
        if self.broken:
            raise RuntimeError("a healthy probe raised, too")
        chunk = self._running.pop(blamed).chunk
        self._culprits.end(chunk)
        self._suspects.blame(blamed)
        self._ended.append((blamed, RequestRefused(f"chunk {blamed}: {RAISED}")))

    def _decode(self, chunk_id: str, running: RunningChunk) -> None:
        chunk, before = running.chunk, len(running.tokens)
        for token in list(islice(running.ahead(), self._step_tokens)):
            running.tokens.append(token)
            if token == EOS:
                return self._finish(chunk_id, ChunkEnd.STOP)
            if len(running.tokens) == chunk.max_tokens:
                return self._finish(chunk_id, ChunkEnd.LENGTH)
        self._suspects.made(chunk_id, len(running.tokens) - before)

    def _finish(self, chunk_id: str, end: ChunkEnd) -> None:
        running = self._running.pop(chunk_id)
        self._suspects.leave(chunk_id)
        self._swallowed.discard(chunk_id)
        chunk, tokens = running.chunk, np.array(running.tokens, np.int32)
        context = np.concatenate([chunk.token_ids, tokens])
        self._blocks.keep(block_names(chunk, context[:-1]))
        saved = self._save(chunk, context, end)
        self._made, computed_tokens = self._made + len(tokens), len(chunk.token_ids) - running.cached_tokens
        self._kv_counts.update({"local_tokens": running.cached_tokens, "recomputed_tokens.miss": computed_tokens})
        result = result_of(running, tokens, end, self.weights.version, saved)
        self._ended.append((chunk_id, result))

    def _save(self, chunk: ChunkRequest, context: np.ndarray, end: ChunkEnd) -> list[bytes]:
        """Saves the KV of a chunk's context in the pool. Returns the names of its blocks."""
        if self._pool is None or chunk.kv is None or not chunk.kv.save:
            return []
        if end is ChunkEnd.STOP and not chunk.kv.save_stopped:
            return []
        names = block_names(chunk, context)
        self._written.update(names)
        for name in names:
            self._pool.setdefault(pool_key(name), adapted(self.weights.content, digest_of_adapter(chunk.adapter)))
        return names

    def reset_cache(self) -> bool:
        return not self._running

    def stats(self) -> EngineStats:
        made = self._made
        return EngineStats(
            **self._constant,
            weights_version=self.weights.version,
            weights_source=self.weights.source,
            weights_digest=self.weights.digest,
            asleep=self.weights.asleep,
            score=self.weights.scored,
            score_drift=self.weights.drift,
            observed_at=self._now(),
            steps=self._steps,
            step_counts=(0, self._steps),
            performance=Performance.linear(self._now(), 0.003, 0.001, prefill_token_s=1e-4, start_s=1.0),
            work={"steps": self._steps, "step_us": 4_000 * self._steps, "tokens": made, "verifications": made},
            kv_counts=dict(self._kv_counts),
            running={chunk_id: len(running.tokens) for chunk_id, running in self._running.items()},
            key_prefixes=(KEY_PREFIX,) if self._pool is not None else (),
            token_bytes=64,
            adapters=self.adapters.known(),
        )

    def close(self) -> None:
        self._running.clear()
