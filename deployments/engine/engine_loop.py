"""The commands and steps of one engine, without a thread: an inbox, and turns that run its commands and step once.

Invariant: every submitted chunk is answered exactly once, by one call of its `on_done` in a turn.
The answer is a ChunkResult or an exception.
A bad chunk or command fails alone. A step that raises fails all chunks and is final.
An engine whose turn does not end is not healthy, even if its thread is alive.
Run by EngineRunner on a thread, and by the shell simulation on a virtual clock.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from tailrace.deployments.channel.frames import carries
from tailrace.deployments.engine.engine_steps import Steps
from tailrace.deployments.messages.chunk import KV_CACHE, WEIGHTS, ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.command import (
    CheckWeights,
    Command,
    FallAsleep,
    ForgetAdapter,
    LoadAdapter,
    LoadWeights,
    NameAdapter,
    Peek,
    ReadWeights,
    RejoinPool,
    ResetCache,
    TransferWeights,
    WakeKv,
)
from tailrace.deployments.messages.errors import EngineDown

OnDone = Callable[[ChunkResult | Exception], None]

STEP_ALLOWANCE_S = 60.0
"""Minimum seconds that a turn may take: first steps of new shapes compile kernels."""

SLOW_STEPS = 20
"""Multiple of the slowest recent turn that a turn may take."""

FADE = 0.99
"""Factor by which the slowest turn fades per turn: after 500 quick turns a first step that compiled for 10 s has no
effect.
"""

LOAD_ALLOWANCE_S = 900.0
"""Seconds that a load of weights may take: hundreds of GB come from a network folder."""


SNAPSHOT_S = 0.02
"""Maximum age, in seconds, of the figures of an engine whose steps only bring new tokens; any other event renews
them.
"""

EARLY_ABORTS = 1024
"""Maximum number of remembered aborts of chunks that are not here. An abort comes over a line, and may overtake a chunk
that comes by a call of Ray, with its images. Most of these aborts are of chunks that have just ended.
"""

CHANGES = LoadWeights, FallAsleep
"""Commands that wait for the chunks in flight; an engine in which one fails half-way is ended."""

SLOW = LoadWeights, FallAsleep, CheckWeights, ReadWeights, TransferWeights, LoadAdapter
"""Commands that may take LOAD_ALLOWANCE_S."""


class EngineLoop:
    """`now`: a monotonic clock, seconds. One thread calls `turn` and `end`; any thread may call the other methods."""

    def __init__(self, stepper: Steps, now: Callable[[], float] = time.monotonic):
        self._stepper, self._now = stepper, now
        self._inbox: SimpleQueue[tuple] = SimpleQueue()
        self._on_done: dict[str, OnDone] = {}
        self._later: deque[tuple] = deque()  # a load of weights that waits for running chunks, and later commands
        self._early: deque[str] = deque(maxlen=EARLY_ABORTS)
        self._lock = threading.Lock()  # between `submit` and the end of the loop, which answers the remaining calls
        self._down: EngineDown | None = None
        self._stats, self._snapshot_s = stepper.stats(), now()
        self._turn_began_s: float | None = None  # start of the turn in progress; None between turns
        self._allowance_s = STEP_ALLOWANCE_S
        self._slowest_s = 0.0
        self.weights_pause_s = 0.0  # of the last load: from the last token before it to its end

    def submit(self, chunk: ChunkRequest, on_done: OnDone) -> None:
        """Queues a chunk. `on_done` gets its result, the error that ended it, or EngineDown."""
        with self._lock:
            down = self._down
            if down is None:
                self._inbox.put((self._add, chunk, self._now(), on_done))
        if down is not None:
            on_done(down)

    def abort(self, chunk_id: str, keep_kv: bool = False) -> None:
        """Ends a chunk after the step in progress, as ABORTED with its tokens so far. It may come before the chunk
        if no line carries that; other unknown ids are ignored.

        `keep_kv`: the sample will continue elsewhere, so its KV is worth saving.
        """
        self._inbox.put((self._abort, chunk_id, keep_kv))

    def ask(self, command: Command) -> Future:
        """Does a command between two steps; the future gets its answer. See `deployments.messages.command`."""
        answer: Future = Future()
        with self._lock:
            if self._down is None:
                self._inbox.put((self._answer, command, self._now(), answer))
            else:
                answer.set_exception(self._down)
        return answer

    def stats(self) -> EngineStats:
        """Returns the latest snapshot, SNAPSHOT_S or a step old, with all chunks that were answered; costs nothing."""
        return self._stats

    @property
    def healthy(self) -> bool:
        """Returns False once the engine is stopped or broken, which is final, or while a turn exceeds its allowance."""
        return self._down is None and self.overdue_s <= 0.0

    @property
    def overdue_s(self) -> float:
        """Returns the seconds by which the turn in progress exceeds its allowance; not above 0 for a healthy engine."""
        began_s = self._turn_began_s  # the other thread may end its turn meanwhile
        return 0.0 if began_s is None else self._now() - began_s - self._allowance_s

    @property
    def problem(self) -> str | None:
        """Returns in one line why the engine is not healthy, or None."""
        if self._down is not None:
            return str(self._down)
        if (overdue_s := self.overdue_s) > 0.0:
            return f"a step has not ended after {overdue_s + self._allowance_s:.0f} s"
        return None

    # ---- for the one thread --------------------------------------------------------------------------

    def turn(self, wait_s: float) -> bool:
        """Runs the commands in the inbox and steps once. Returns False when the loop is down. Waits up to `wait_s` if
        it is idle.
        """
        waiting = self._next(0.0 if self._stepper.busy else wait_s)
        self._turn_began_s = began_s = self._now()
        news = waiting is not None or not self._stepper.busy
        try:
            self._obey(waiting)
            ended = self._stepper.step() if self._stepper.busy else []
            if news or ended or began_s - self._snapshot_s >= SNAPSHOT_S:
                self._renew_stats(began_s)
            for chunk_id, result in ended:
                self._on_done.pop(chunk_id)(result)
            if self._catch_up():
                self._renew_stats(began_s)
        except Exception as error:  # noqa: BLE001 - the edge of the loop: every chunk gets the error, Serve restarts
            self._stop(f"engine {self._stats.replica_id}: a step failed: {error!r}")
        self._turn_began_s = None
        if self._allowance_s != LOAD_ALLOWANCE_S:
            self._slowest_s = max(FADE * self._slowest_s, self._now() - began_s)
        self._allowance_s = max(STEP_ALLOWANCE_S, SLOW_STEPS * self._slowest_s)
        return self._down is None

    def end(self) -> None:
        """Answers outstanding calls with the reason why the loop is down, and closes the stepper."""
        for on_done in self._on_done.values():
            on_done(self._down)
        while not self._inbox.empty():
            self._later.append(self._inbox.get())
        for command, *args in self._later:
            if command == self._add:
                args[-1](self._down)
            elif args and isinstance(args[-1], Future) and args[-1].set_running_or_notify_cancel():
                args[-1].set_exception(self._down)
        self._stepper.close()

    def request_stop(self) -> None:
        """Ends the loop after the turn that reads this, which still steps once; outstanding chunks get EngineDown."""
        self._inbox.put((self._stop, "the engine was stopped"))

    # ------------------------------------------------------------------------------------------------

    def _next(self, wait_s: float) -> tuple | None:
        try:
            return self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
        except Empty:
            return None

    def _obey(self, item: tuple | None) -> None:
        """Runs the command `item` and those in the inbox."""
        while item is not None:
            if self._waits(item):
                self._later.append(item)
            else:
                item[0](*item[1:])
            item = self._next(0.0)

    def _waits(self, item: tuple) -> bool:
        """Returns whether a command waits: a load for chunks in flight; later chunks and their aborts for the load."""
        command, *args = item
        if self._is_load(item):
            return bool(self._later) or self._is_early(item)
        later = command == self._add or (command == self._abort and args[0] not in self._on_done)
        return later and bool(self._later)

    def _is_load(self, item: tuple) -> bool:
        return isinstance(item[1], CHANGES)

    def _is_early(self, item: tuple) -> bool:
        """Returns whether a load or a sleep must wait; for a sleep the KV of ended chunks is to be saved, too."""
        return bool(self._on_done) or (isinstance(item[1], FallAsleep) and self._stepper.busy)

    def _renew_stats(self, now_s: float) -> None:
        self._stats, self._snapshot_s = self._stepper.stats(), now_s

    def _catch_up(self) -> bool:
        """Runs the commands that have waited for chunks. Returns whether there were any."""
        ran = False
        while self._later and not (self._is_load(self._later[0]) and self._is_early(self._later[0])):
            command, *args = self._later.popleft()
            command(*args)
            ran = True
        return ran

    def _add(self, chunk: ChunkRequest, submitted_s: float, on_done: OnDone) -> None:
        try:
            if chunk.chunk_id in self._on_done:  # it runs, or it has ended and its KV is being saved
                raise ValueError(f"chunk {chunk.chunk_id}: already running here")
            self._stepper.add(chunk, submitted_s)
        except Exception as error:  # noqa: BLE001 - the edge between one caller's mistake and the shared engine
            on_done(error)
        else:
            self._on_done[chunk.chunk_id] = on_done
            if chunk.chunk_id in self._early and not carries(chunk):
                self._early.remove(chunk.chunk_id)
                self._stepper.abort(chunk.chunk_id, False)

    def _abort(self, chunk_id: str, keep_kv: bool) -> None:
        if chunk_id not in self._on_done:
            self._early.append(chunk_id)
        self._stepper.abort(chunk_id, keep_kv)

    def _answer(self, command: Command, asked_s: float, answer: Future) -> None:
        """Does a command and gives its result, or its error, to its caller; a caller that has left gets nothing."""
        if not answer.set_running_or_notify_cancel():
            return
        try:
            result = self._do(command, asked_s)
        except Exception as error:  # the caller gets any error
            answer.set_exception(error)
            if isinstance(command, CHANGES) and not isinstance(error, ValueError):  # the model may be in parts
                raise
        else:
            answer.set_result(result)

    def _do(self, command: Command, asked_s: float) -> Any:  # noqa: PLR0911, PLR0912 - one branch for each command
        stepper = self._stepper
        if isinstance(command, SLOW):
            self._allowance_s = LOAD_ALLOWANCE_S
        match command:
            case LoadWeights():
                return self._load(command, asked_s)
            case FallAsleep():
                return self._sleep()
            case WakeKv():
                return self._wake()
            case CheckWeights(source):
                return stepper.weights.refusal(source)
            case ReadWeights():
                return stepper.weights.read_back()
            case TransferWeights(transfer):
                return stepper.weights.transfer(transfer)
            case LoadAdapter(path):
                return stepper.adapters.load(path)
            case NameAdapter(adapter):
                return stepper.adapters.name(adapter)
            case ForgetAdapter(name):
                return stepper.adapters.forget(name)
            case ResetCache():
                return stepper.reset_cache()
            case RejoinPool(master_address):
                return stepper.rejoin_pool(master_address)
            case Peek(chunk_id):
                return stepper.peek(chunk_id)
        raise TypeError(f"an engine's loop does not know the command {type(command).__name__}")

    def _load(self, command: LoadWeights, asked_s: float) -> None:
        present = self._stats.weights_version, self._stats.weights_digest
        wanted = command.version, command.digest
        if not command.digest or present != wanted or WEIGHTS in self._stats.asleep:
            weights, since_s = self._stepper.weights, max(asked_s, self._stepper.progress_s)  # scores are steps, too
            weights.score_again(self._stepper)
            weights.load(command.version, command.source, command.digest)
            if command.version == present[0]:  # KV under the same names may be of weights that were set aside
                self._stepper.reset_cache()
            weights.score(self._stepper)
            self.weights_pause_s = self._now() - since_s
        self._stats = self._stepper.stats()  # before the caller can look

    def _sleep(self) -> None:
        if not self._stepper.reset_cache():
            raise ValueError("an engine cannot sleep while chunks run")
        self._stepper.weights.fall_asleep()
        self._stats = self._stepper.stats()

    def _wake(self) -> None:
        if KV_CACHE in self._stats.asleep:  # else chunks may run, and a score would drop their results
            self._stepper.weights.wake_kv()
            self._stepper.weights.score(self._stepper)
            self._stats = self._stepper.stats()

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._down = EngineDown(reason)
