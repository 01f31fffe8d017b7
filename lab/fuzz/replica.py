"""A simulated engine replica: the real EngineLoop and the real Serve shell, stepped on the virtual clock.

Its event loop and its engine's thread are separate, as in a real replica: each can hang alone.
"""

import asyncio
from collections.abc import Callable
from queue import SimpleQueue

from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.channel.engine_line import EngineLine
from tailrace.deployments.engine.engine_loop import EngineLoop
from tailrace.deployments.engine.replica import Engine
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult
from tailrace.deployments.messages.errors import EngineDown
from tailrace.deployments.telemetry import Telemetry
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.lab.fuzz.disk import digest_of
from tailrace.lab.fuzz.stepper import SimulatedStepper
from tailrace.lab.fuzz.virtual_time import Process

IDLE_S = 1.0
"""Maximum seconds that an idle engine waits for a command. A fault that holds its thread shows after it."""

ILLEGAL_ACCESS = "an illegal memory access was encountered"
"""Reason why an engine ends under a deadly sample, in the words of CUDA."""


class Inbox(SimpleQueue):
    """The inbox of an EngineLoop. `arrived`: set by each command."""

    def __init__(self):
        super().__init__()
        self.arrived = asyncio.Event()

    def put(self, item, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self.arrived.set()


class SteppedLoop(EngineLoop):
    """An EngineLoop whose turn can hang, as a step in NCCL does, or end it. `disk`: the disk of its host. `deadly`:
    keys of samples that end it. `ended_by_sample`: whether one has."""

    def __init__(self, stepper: SimulatedStepper, now, deadly: set[int]):
        super().__init__(stepper, now)
        self._inbox = Inbox()
        self.disk, self._deadly, self.ended_by_sample = stepper.disk, deadly, False

    def turn(self, wait_s: float) -> bool:
        self.ended_by_sample = bool(self._deadly) and not self._deadly.isdisjoint(self._stepper.sample_keys)
        if self.ended_by_sample:
            self._stop(ILLEGAL_ACCESS)
            return False
        return super().turn(wait_s)

    def _add(self, chunk: ChunkRequest, submitted_s: float, on_done: Callable) -> None:
        super()._add(chunk, submitted_s, on_done)
        if chunk.sample_key in self._deadly:
            self.ended_by_sample = True
            raise RuntimeError(ILLEGAL_ACCESS)

    async def idle(self) -> None:
        """Returns at the next command, or after IDLE_S seconds."""
        arrived = self._inbox.arrived
        timer = asyncio.get_running_loop().call_later(IDLE_S, arrived.set)
        await arrived.wait()
        timer.cancel()
        arrived.clear()

    def hang(self, hung: bool) -> None:
        self._turn_began_s = self._now() if hung else None


class Shell(Engine.func_or_class):
    """The Serve shell, on a loop that exists already."""

    def __init__(self, replica: "SimulatedReplica", telemetry: Telemetry, started_at: float):
        self._runner, self._telemetry, self._replica = replica.loop, telemetry, replica
        self._line, node_id = None, f"node-{replica.name}"
        self._node_id, self._started_at, self._pool_problem = node_id, started_at, ""
        self._config, self._rank = EngineConfig(model="simulated", cores=None), 0

    def __del__(self):
        pass

    def _dial(self, address: Address, session: str) -> EngineLine:
        return self._replica.dial(self._replica, address, session)

    async def generate_chunk(self, chunk: ChunkRequest) -> ChunkResult:
        result, faults = await super().generate_chunk(chunk), self._replica.answer_faults
        kind, _, number = faults.pop(0).partition(":") if faults else ("", "", "")
        if kind == "late":
            self._replica.late_until_s = max(self._replica.late_until_s, self._replica.now() + float(number))
            await asyncio.sleep(float(number))
        elif kind == "twice":
            result = await super().generate_chunk(chunk)
        elif kind == "error":
            raise EngineDown("a step failed") if number == "down" else RuntimeError("out of memory")
        return damaged(result, int(number)) if kind == "damaged" else result

    async def _fetch(self, source: str) -> None:
        """Does nothing: the disk has weights in memory, too, under the names of their sources."""

    def _checked_digest(self, source: str) -> str:
        return digest_of(self._runner.disk.read(source))


class SimulatedReplica(Process):
    """One engine replica. `step_s`: seconds of a step. `dial`: opens its line. `..._until_s`: when a fault ends."""

    def __init__(
        self,
        name: str,
        stepper: SimulatedStepper,
        step_s: float,
        telemetry: Telemetry,
        started_at: float,
        dial: Callable[["SimulatedReplica", Address, str], EngineLine],
        deadly: set[int],
    ):
        super().__init__(name)
        now = asyncio.get_running_loop().time
        self.loop = SteppedLoop(stepper, now, deadly)
        self.shell, self.dial = Shell(self, telemetry, started_at), dial
        self.ways: list = []  # both directions of its line
        self.stepper, self._step_s, self.now = stepper, step_s, now
        self.stopping = False  # Serve routes no new call to it
        self.failed_checks = 0
        self.hung_until_s = self.silent_until_s = self.parted_until_s = self.slow_until_s = 0.0
        self.late_until_s = 0.0  # when the last of its late answers comes, which a driver may have given up
        self.answer_faults: list[str] = []  # faults of its next chunks' ends
        self.hold_errors: asyncio.Queue[int] = asyncio.Queue()  # errors of Ray that its line's call meets
        self.spawn(self._drive())

    async def _drive(self) -> None:
        while self.loop.turn(0.0):
            if self.hung_until_s > self.now():
                self.loop.hang(True)
                await until(self, "hung_until_s")
                self.loop.hang(False)
            if self.stepper.busy:
                await asyncio.sleep(self._step_s * (8 if self.slow_until_s > self.now() else 1))
            else:
                await self.loop.idle()
        self.loop.end()

    @property
    def reachable(self) -> bool:
        return max(self.parted_until_s, self.silent_until_s) <= self.now()

    async def reached(self) -> None:
        """Returns when a message can pass and the event loop takes it."""
        await until(self, "parted_until_s")
        await until(self, "silent_until_s")


async def until(replica: SimulatedReplica, field: str) -> None:
    """Returns once a fault is over. A fault can be prolonged meanwhile."""
    now = asyncio.get_running_loop().time
    while getattr(replica, field) > now():
        await asyncio.sleep(getattr(replica, field) - now())


DAMAGES = 10


def damaged(result: ChunkResult, kind: int):
    """Returns an ill-formed answer, by `kind`."""
    from dataclasses import replace

    import numpy as np

    more = np.concatenate([result.token_ids, np.arange(1, 600, dtype=np.int32)])
    return [
        None,
        "not a result",
        replace(result, stored_tokens=10**9),
        replace(result, token_ids=more),
        replace(result, logprobs=result.logprobs[:-1]),
        replace(result, logprobs=np.full_like(result.logprobs, np.nan)),
        replace(result, accepted_tokens=5),
        replace(result, weights_version=result.weights_version + 1),
        replace(result, token_ids=-result.token_ids - 1),
        replace(result, chunk_id="another"),
    ][kind]
