"""The coordinator's process of `tailrace bench fleet`: everything is as in its Serve replica, except Serve's handle.

`FleetHandle` replaces the handle: it knows the names of the replicas, and its one call makes an engine's process open a
line. A delay begins when an engine has made a chunk's result, and ends when the next chunk for the same replica is
given to its line. Delays are measured by the clock, and by the processor time of the loop's thread, in which other
programs of the machine do not count. Called by lab/benchmarks/control_plane/fleet.py.
"""

import asyncio
import cProfile
import gc
import marshal
import resource
import time
from array import array
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from ray._private.async_compat import get_new_event_loop

from tailrace.app.files.output_file import OutputFile
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.batches.token_log import TokenLog
from tailrace.deployments.channel.sockets import ListeningSocket
from tailrace.deployments.coordinator.engine_client import EngineClient
from tailrace.deployments.coordinator.rollouts import Rollouts
from tailrace.deployments.garbage import collect_garbage
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult
from tailrace.deployments.messages.errors import ChunkNotTaken
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, Rejected, RolloutBatch
from tailrace.deployments.telemetry import Telemetry
from tailrace.lab.benchmarks.control_plane.fleet_load import CHUNK_TOKENS, GROUP_SAMPLES, TOKENS_PER_S, aged, young
from tailrace.lab.benchmarks.observability.coordinator_cost import observing_cost
from tailrace.lab.benchmarks.observability.tracing_cost import TracingCost
from tailrace.policies.families.registry import Policies

HOST = "127.0.0.1"

WAITING = 0.5
"""Number of waiting samples for each running one, so that every room that becomes free is filled at once."""

BATCH_GROUPS = 128
"""Maximum number of groups of a batch."""

CHUNK_S = 6_700 / TOKENS_PER_S
"""Seconds of an average chunk: an answer of 20,000 tokens has 3 chunks."""

BEAT_S = 0.005
"""Seconds between beats of the loop. A late beat shows how long the loop was held."""

RENEW_S = 5.0
SETTLED_S = 5.0
SETTLE_AT_MOST_S = 600.0


class Fleet(NamedTuple):
    """One size of the fleet. `past`: whether engines make, and answers keep, the tokens that groups have at the start.

    `observed_pairs`: number of pairs of windows, before the figures, in which metrics, traces and a board are off and
    on; 0 for none. `every_group`: whether every group has spans; else some have.
    """

    replicas: int
    running: int
    seconds: float
    speed: float
    past: bool
    profile: OutputFile | None = None
    observed_pairs: int = 0
    every_group: bool = False


class FleetPrompts(Prompts):
    """Prompts of token ids alone. There is no tokenizer, so that answers have no text."""

    def __init__(self):
        self.model, self.max_model_len, self.is_multimodal = "modelled", 1 << 20, False
        self.tokenizer_name, self._vocabulary, self._ends = "", 1 << 20, ()

    def decode(self, token_ids: list[int], special: bool = False) -> str:
        return ""


class FleetHandle:
    """A handle of the modelled engines. `pipes`: pipe to the process of each replica, by the replica's name."""

    def __init__(self, pipes: dict[str, Connection]):
        self.pipes = pipes

    def options(self, session_id: str, method_name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._call, session_id, method_name))

    async def _call(self, name: str, method: str, address: tuple, session: str, again: bool) -> None:
        if method != "hold_line":
            raise ChunkNotTaken(f"a modelled engine has no {method}")
        self.pipes[name].send(("open", name, address, session))
        await asyncio.Event().wait()  # as long as the replica lives


class Delays:
    """Delays from chunk ends to next starts. `note` must be called often: the loop's processor time at a chunk's end is
    interpolated between two calls of it.
    """

    def __init__(self):
        self._ends_s, self._starts_s, self._starts_cpu_s = array("d"), array("d"), array("d")
        self._at_s, self._cpu_s = array("d"), array("d")

    def note(self) -> None:
        self._at_s.append(time.monotonic())
        self._cpu_s.append(time.thread_time())

    def add(self, ended_s: float) -> None:
        """Adds the delay of a room that became free at `ended_s` and is filled now."""
        self.note()
        self._ends_s.append(ended_s)
        self._starts_s.append(self._at_s[-1])
        self._starts_cpu_s.append(self._cpu_s[-1])

    def seconds(self) -> np.ndarray:
        """Returns the delays in seconds of the monotonic clock."""
        return np.asarray(self._starts_s) - np.asarray(self._ends_s)

    def own_s(self) -> np.ndarray:
        """Returns the delays in seconds of processor time of the loop's thread."""
        return np.asarray(self._starts_cpu_s) - np.interp(self._ends_s, self._at_s, self._cpu_s)

    def clear(self) -> None:
        for one in (self._ends_s, self._starts_s, self._starts_cpu_s):
            del one[:]


class TimedEngines(EngineClient):
    """An engine client with the delays of the module docstring. `ended`: number of chunks that have ended."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.delays, self.ended = Delays(), 0
        self._free: dict[str, deque[float]] = defaultdict(deque)  # when the replica's rooms came free

    async def generate(self, replica_id: str, chunk: ChunkRequest) -> ChunkResult:
        if free := self._free[replica_id]:
            self.delays.add(free.popleft())
        result = await super().generate(replica_id, chunk)
        self.ended += 1
        self._free[replica_id].append(result.queue_s)
        return result


class FleetDriver:
    """A driver that keeps the fleet full, reads every group and drops it."""

    def __init__(self, rollouts: Rollouts):
        self._rollouts, self._batches, self.wanted = rollouts, 0, 0
        self._readers: set[asyncio.Task] = set()
        self._taken: dict[str, int] = {}  # number of received groups, by batch
        self.groups = self.tokens = 0
        self.problems: list[str] = []

    def submit(self, groups: tuple[PromptGroup, ...]) -> None:
        self._batches += 1
        self._readers.add(asyncio.ensure_future(self._read(f"b{self._batches}", groups)))

    async def _read(self, name: str, groups: tuple[PromptGroup, ...]) -> None:
        message, self._taken[name] = RolloutBatch(batch_id=name, groups=groups), 0
        async for group in self._rollouts.deliveries.read(message, name, ()):
            if isinstance(group, Rejected):
                self.problems.append(group.reason)
                break
            self._take(name, group)
        del self._taken[name]

    def _take(self, name: str, group: GroupResult) -> None:
        self.groups += 1
        self.tokens += sum(len(sample.token_ids) for sample in group.samples)
        self.problems += [sample.error for sample in group.samples if sample.error]
        self._taken[name] += 1
        self._rollouts.deliveries.renew(name, name, self._taken[name])

    async def live(self) -> None:
        """Keeps `wanted` samples in flight, and renews the batches. Never returns."""
        renewed_s = 0.0
        while True:
            books = self._rollouts.books()
            groups = min(BATCH_GROUPS, 1 + self.wanted // (8 * GROUP_SAMPLES))
            if self.wanted - books["waiting"] - books["running"] >= groups * GROUP_SAMPLES:
                self.submit(young(groups, self._batches))
            if time.monotonic() > renewed_s + RENEW_S:
                renewed_s = time.monotonic()
                for name, taken in self._taken.items():
                    self._rollouts.deliveries.renew(name, name, taken)
            await asyncio.sleep(0.1)


class Holds:
    """Seconds for which the loop was held, beat by beat. `gc_s`: seconds of each of Python's garbage collections, which
    are part of the holds.
    """

    def __init__(self):
        self.seconds, self.gc_s, self._gc_began_s = array("d"), array("d"), 0.0
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, _: dict) -> None:
        if phase == "start":
            self._gc_began_s = time.monotonic()
        else:
            self.gc_s.append(time.monotonic() - self._gc_began_s)

    async def beat(self, note: Callable[[], None]) -> None:
        """Measures a hold every BEAT_S, and calls `note` before. Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            note()
            due_s = loop.time() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.seconds.append(loop.time() - due_s)


@asynccontextmanager
async def coordinator(handle: FleetHandle, telemetry: Telemetry) -> AsyncIterator[tuple[Rollouts, TimedEngines]]:
    """Yields the rollouts and the engine client of a coordinator, whose loops run as those of `Coordinator` do."""
    engines = TimedEngines(handle, partial(ListeningSocket, HOST), "fleet", running=lambda handle: list(handle.pipes))
    rollouts = Rollouts(
        engines=engines,
        prompts=FleetPrompts(),
        policies=Policies(chunking={"type": "fixed", "chunk_tokens": CHUNK_TOKENS}),
        telemetry=telemetry,
        kv_pool_manager=None,
        context=None,
        token_log=TokenLog(None, "fleet"),
        nonce="fleet",
    )
    loops = rollouts.run(), rollouts.look(), engines.follow(), collect_garbage(lambda: not rollouts.batches)
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    yield rollouts, engines
    for task in tasks:
        task.cancel()


class FleetCounts(NamedTuple):
    """Counts of both sides at one moment. `late_s`: seconds by which ends of chunks were late, since the last count.
    `left`: number of engines whose line has ended; no other line is opened for them here.
    """

    at_s: float
    cpu_s: float
    loop_cpu_s: float
    ended: int
    groups: int
    tokens: int
    reports: int
    engines_cpu_s: float
    late_s: list[float]
    left: int


class FleetMeasured:
    """One run of one size."""

    def __init__(self, fleet: Fleet, pipes: list[Connection], say: Connection):
        self._fleet, self._pipes, self._say_to = fleet, pipes, say
        self._tracing = TracingCost() if fleet.observed_pairs else None

    def _say(self, text: str) -> None:
        self._say_to.send(f"{self._fleet.replicas} replicas: {text}")

    async def run(self, handle: FleetHandle) -> dict:
        fleet = self._fleet
        telemetry = Telemetry("tailrace-coordinator", fleet.observed_pairs > 0, every_group=fleet.every_group)
        async with coordinator(handle, telemetry) as (rollouts, engines):
            driver, holds = FleetDriver(rollouts), Holds()
            full = fleet.replicas * fleet.running
            groups, unended = await asyncio.to_thread(aged, full, fleet.past)
            self._say(f"{len(groups)} groups, {unended} samples that have not ended")
            others = [asyncio.ensure_future(loop) for loop in (driver.live(), holds.beat(engines.delays.note))]
            filled = await self._fill(driver, groups, engines, rollouts, full)
            await asyncio.sleep(2 * SETTLED_S)
            if fleet.observed_pairs:
                filled["observed"] = await observing_cost(rollouts, engines, self._tracing, fleet.observed_pairs)
            engines.delays.clear()
            del holds.seconds[:], holds.gc_s[:]
            before = await self._counts(engines, driver)
            if fleet.profile:
                profile = cProfile.Profile()
                profile.enable()
            await asyncio.sleep(fleet.seconds)
            if fleet.profile:
                profile.disable()
                profile.create_stats()
                fleet.profile.write(marshal.dumps(profile.stats))
            after = await self._counts(engines, driver)
            problems = [*driver.problems, *(f"{name}: {count}" for name, count in rollouts.status().contained.items())]
            if after.left:
                problems.insert(0, f"{after.left} engines have left")
            for other in others:
                other.cancel()
            found = figures(before, after, engines.delays, holds, fleet.speed)
            del holds.gc_s[:]
            gc.collect()
            found["gc_full_ms"] = _ms(holds.gc_s, 1.0)
        return found | filled | {"problems": problems[:5]}

    async def _fill(
        self, driver: FleetDriver, groups: tuple[PromptGroup, ...], engines: TimedEngines, rollouts: Rollouts, full: int
    ) -> dict:
        """Fills the fleet. Returns seconds, chunks and processor seconds until all rooms are taken and chunks end at
        the rate of their tokens, or until SETTLE_AT_MOST_S are over.
        """
        began_s, cpu_s = time.monotonic(), time.process_time()
        for first in range(0, len(groups), BATCH_GROUPS):  # else all past tokens would come at once
            driver.submit(groups[first : first + BATCH_GROUPS])
            await asyncio.sleep(0.05)
            while rollouts.books()["waiting"] > BATCH_GROUPS * GROUP_SAMPLES:
                await asyncio.sleep(0.01)
        driver.wanted = int((1 + WAITING) * full)
        expected = SETTLED_S * full / CHUNK_S * self._fleet.speed
        while time.monotonic() < began_s + SETTLE_AT_MOST_S:
            ended = engines.ended
            await asyncio.sleep(SETTLED_S)
            books, ends = rollouts.books(), engines.ended - ended
            self._say(f"{books['running']} samples run, {books['waiting']} wait, {ends / SETTLED_S:.0f} chunk ends/s")
            if driver.problems and not books["running"]:
                raise RuntimeError(f"nothing runs: {driver.problems[0]}")
            if books["running"] >= 0.98 * full and books["waiting"] >= 0.7 * WAITING * full and ends < 1.3 * expected:
                break
        took_s = time.monotonic() - began_s
        return {
            "fill_s": round(took_s, 1),
            "fill_chunks": engines.ended,
            "fill_cpu_s": round(time.process_time() - cpu_s, 1),
        }

    async def _counts(self, engines: TimedEngines, driver: FleetDriver) -> FleetCounts:
        def ask() -> list[tuple[int, float, list[float], int]]:
            for pipe in self._pipes:
                pipe.send(("count",))
            return [pipe.recv() for pipe in self._pipes]

        answers = await asyncio.to_thread(ask)
        return FleetCounts(
            at_s=time.monotonic(),
            cpu_s=time.process_time(),
            loop_cpu_s=time.thread_time(),
            ended=engines.ended,
            groups=driver.groups,
            tokens=driver.tokens,
            reports=sum(answer[0] for answer in answers),
            engines_cpu_s=sum(answer[1] for answer in answers),
            late_s=[late_s for answer in answers for late_s in answer[2]],
            left=sum(answer[3] for answer in answers),
        )


def figures(before: FleetCounts, after: FleetCounts, delays: Delays, holds: Holds, speed: float) -> dict:
    """Returns the figures between two counts. Rates are per second of the clock, at `speed` times the real pace."""
    took_s = after.at_s - before.at_s

    def rate(name: str) -> float:
        return (getattr(after, name) - getattr(before, name)) / took_s

    return {
        "speed": speed,
        "seconds": round(took_s, 1),
        "chunks_per_s": round(rate("ended"), 1),
        "core_share": round(rate("cpu_s"), 3),
        "loop_share": round(rate("loop_cpu_s"), 3),
        "delay_p50_ms": _ms(delays.own_s(), 0.5),
        "delay_p99_ms": _ms(delays.own_s(), 0.99),
        "delay_max_ms": _ms(delays.own_s(), 1.0),
        "wall_delay_p50_ms": _ms(delays.seconds(), 0.5),
        "wall_delay_p99_ms": _ms(delays.seconds(), 0.99),
        "hold_p99_ms": _ms(holds.seconds, 0.99),
        "hold_max_ms": _ms(holds.seconds, 1.0),
        "gc_max_ms": _ms(holds.gc_s, 1.0),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "reports_per_s": round(rate("reports"), 1),
        "groups_per_s": round(rate("groups"), 2),
        "result_tokens_per_s": round(rate("tokens")),
        "engines_core_share": round(rate("engines_cpu_s"), 3),
        "engines_late_p99_ms": _ms(after.late_s, 0.99),
    }


def _ms(seconds: Sequence[float] | np.ndarray, share: float) -> float:
    return round(1e3 * float(np.quantile(seconds, share)), 2) if len(seconds) else 0.0


def coordinate(fleet: Fleet, names: list[list[str]], pipes: list[Connection], answer: Connection) -> None:
    """Runs one size in the coordinator's process, and sends its progress and its figures to `answer`. `names`: names of
    the replicas of each pipe's process.
    """
    handle = FleetHandle({name: pipe for some, pipe in zip(names, pipes, strict=True) for name in some})
    with asyncio.Runner(loop_factory=get_new_event_loop) as runner:
        answer.send(runner.run(FleetMeasured(fleet, pipes, answer).run(handle)))
