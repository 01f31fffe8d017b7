"""A soak from beginning to end: references, two drivers under faults, samples that crossed updates, nothing left over.

Invariant: nothing that was started here runs afterwards. Ctrl-C and SIGTERM end the faults and the drivers; the report
is then of the time so far. Called by `tailrace soak`.
"""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile
from tailrace.deployments.messages.rollout import PromptGroup
from tailrace.lab.soak import crossings, faults
from tailrace.lab.soak.answers import AnswerBook
from tailrace.lab.soak.driver_process import FINISH_S, DriverProcess
from tailrace.lab.soak.memory import WARM_S, ProcessLog
from tailrace.lab.soak.processes import is_alive, read_all
from tailrace.lab.soak.schedule import Strike, strikes
from tailrace.lab.soak.scripts import DriverScript, scripts_of
from tailrace.lab.soak.setting import DISTURBED, UNDISTURBED, file_of, weights_of
from tailrace.lab.soak.watch import ServiceWatch
from tailrace.lab.verification.leftovers import SETTLE_S
from tailrace.lab.verification.tokens import whole

LOOK_S = 0.5
MEMORY_S = 5.0
LINE_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """Plan of a soak: how long, which faults, how often. `gap_s`: min and max time between two faults."""

    minutes: float
    seed: int
    kinds: tuple[str, ...]
    gap_s: tuple[float, float]


def soak(file: ServeFile, prompts: Sequence[PromptGroup], plan: SoakPlan, say: Say) -> dict:
    """Runs a soak. Returns its report, see lab/soak/report.py."""
    with TemporaryDirectory(prefix="tailrace-soak-") as name:
        folder = Path(name)
        say("making weights")
        folders = weights_of(file, folder)
        scripts = scripts_of(prompts, folders, file.application.name)
        file = file_of(file, folder)
        say("starting the service: two engines, a draft model, a pool")
        with service(file, None) as client:
            live = LiveSoak(client, scripts, folders, plan, say)
            report = asyncio.run(live.run(folder, file.application.args.replicas.max))
        return report | {"left_over": left_over(live.log)}


def left_over(log: ProcessLog) -> int:
    """Returns the number of the soak's processes, except this one, that still run SETTLE_S after its end."""
    others = [key for key, role in log.roles.items() if role != "soak"]
    deadline_s = time.monotonic() + SETTLE_S
    while (left := sum(is_alive(*key) for key in others)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return left


class LiveSoak:
    """One soak on a running service. `log`: every process that it has seen."""

    def __init__(
        self,
        client: RolloutClient,
        scripts: Sequence[DriverScript],
        folders: Sequence[str],
        plan: SoakPlan,
        say: Say,
    ):
        self._client, self._scripts, self._folders, self._plan, self._say = client, scripts, folders, plan, say
        self._book = AnswerBook(scripts, len(folders))
        self.log, self._watch = ProcessLog(), ServiceWatch()
        self._struck: list[dict] = []
        self._began_s = time.monotonic()

    async def run(self, folder: Path, replicas: int) -> dict:
        """Runs the soak. `folder`: for the drivers' files."""
        await self._refer(replicas)
        self._began_s = time.monotonic()
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        drivers = self._drivers(folder)
        tasks = [asyncio.create_task(work) for work in (self._measure(), self._look(), self._strike(drivers))]
        rolling = [asyncio.create_task(driver.run()) for driver in drivers.values()]
        try:
            await self._wait(stopped, [*rolling, *tasks[:2]])
            tasks.pop().cancel()  # no more faults
            seconds = self._now()
            memory = self.log.report(min(WARM_S, seconds / 4))
            await self._finish(drivers, rolling, stopped)
            unfinished = self._book.unfinished
            if not stopped.is_set():
                for name in drivers:
                    self._book.close(name)
            crossed = await self._check_crossed(stopped)
        finally:
            await _cancelled(*tasks, *rolling)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._report(seconds, stopped.is_set(), unfinished, crossed) | {"memory": memory}

    async def _refer(self, replicas: int) -> None:
        """Makes the references: rolls out each batch under each folder of weights, undisturbed."""
        await whole(self._client, replicas)
        await self._client.set_policies(UNDISTURBED)
        for weights, folder in enumerate(self._folders):
            began_s = time.monotonic()
            if weights:
                await self._client.update_weights(weights, folder)
            names = [(script, number) for script in self._scripts for number in range(len(script.batches))]
            await asyncio.gather(*(self._learn(script, number, weights) for script, number in names))
            self._say(f"references {weights + 1}/{len(self._folders)}: {time.monotonic() - began_s:.0f} s")
        await self._client.set_policies(DISTURBED)

    async def _learn(self, script: DriverScript, number: int, weights: int) -> None:
        batch = script.batches[number].model_copy(update={"batch_id": f"soak-{script.name}-{number}-of-{weights}"})
        groups = [group async for group in self._client.rollout(batch)]
        self._book.learn(script.name, number, weights, groups)

    def _drivers(self, folder: Path) -> dict[str, DriverProcess]:
        import ray

        address = ray.get_runtime_context().gcs_address
        return {s.name: DriverProcess(s, address, folder, self._book.hear) for s in self._scripts}

    async def _wait(self, stopped: asyncio.Event, endless: Sequence[asyncio.Task]) -> None:
        """Waits until the time is up, or somebody stops the soak. Raises the error of a task that ought not to end."""
        waiting = asyncio.create_task(stopped.wait())
        seconds = 60 * self._plan.minutes
        done, _ = await asyncio.wait([waiting, *endless], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(waiting)
        for task in done - {waiting}:
            task.result()

    async def _finish(self, drivers: dict, rolling: Sequence[asyncio.Task], stopped: asyncio.Event) -> None:
        """Lets the batches in flight end, unless the soak was stopped."""
        for driver in drivers.values():
            driver.finish()
        if not stopped.is_set():
            self._say("no more faults; the last batches are to end")
            waiting = asyncio.create_task(stopped.wait())
            both = asyncio.gather(*rolling)
            await asyncio.wait([both, waiting], timeout=FINISH_S, return_when=asyncio.FIRST_COMPLETED)
            await _cancelled(waiting)
        await _cancelled(*rolling)

    async def _check_crossed(self, stopped: asyncio.Event) -> dict:
        """Checks the samples that crossed updates; if the soak is stopped, none or a part of them. An error of the
        check is part of the report, which has the rest.
        """
        unchecked = sum(len(one.stretches) - 1 for one in self._book.crossed)
        none = {"samples": len(self._book.crossed), "checked": 0, "unchecked": unchecked}
        if stopped.is_set():
            return none
        checking = asyncio.create_task(crossings.check(self._client, self._folders, self._book, self._say))
        waiting = asyncio.create_task(stopped.wait())
        await asyncio.wait([checking, waiting], return_when=asyncio.FIRST_COMPLETED)
        error = checking.exception() if checking.done() else None
        result = checking.result() if checking.done() and error is None else none
        await _cancelled(waiting, checking)
        return result if error is None else result | {"error": faults.said(error)}

    async def _strike(self, drivers: dict[str, DriverProcess]) -> None:
        plan = self._plan
        for strike in strikes(plan.seed, 60 * plan.minutes, plan.kinds, plan.gap_s):
            await asyncio.sleep(max(0.0, strike.at_s - self._now()))
            await self._act(strike, drivers)

    async def _act(self, strike: Strike, drivers: dict[str, DriverProcess]) -> None:
        at_s = round(self._now(), 1)
        happened, note = await faults.act(strike.kind, faults.Scene(self._client, drivers, strike.place))
        self._struck.append({"at_s": at_s, "kind": strike.kind, "happened": happened, "note": note})
        self._say(f"{clock(at_s)} {strike.kind}: {note}")

    async def _look(self) -> None:
        while True:
            try:
                self._watch.look(self._now(), await self._client.status())
            except Exception as error:  # noqa: BLE001 - whatever a disturbed service gives; it is counted
                self._watch.miss(error)
            await asyncio.sleep(LOOK_S)

    async def _measure(self) -> None:
        """Records the memory of all processes, and prints a line of progress."""
        said_s = self._now()
        while True:
            readings = await asyncio.to_thread(read_all)
            self.log.add(self._now(), readings)
            if self._now() - said_s >= LINE_S:
                said_s = self._now()
                self._say(self._line())
            await asyncio.sleep(MEMORY_S)

    def _line(self) -> str:
        counts, rates = self._book.counts, self._watch.rates
        rate = f"{rates[-1][1]:.0f} tokens/s, " if rates else ""
        return (
            f"{clock(self._now())} of {clock(60 * self._plan.minutes)}: {rate}{counts['batches']} batches, "
            f"{counts['samples']} samples, {counts['updates']} updates, {len(self._struck)} faults, "
            f"{counts['lost']} lost, {len(self._book.wrong)} wrong"
        )

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _report(self, seconds: float, stopped: bool, unfinished: int, crossed: dict) -> dict:
        happened = Counter(one["kind"] for one in self._struck if one["happened"])
        missed = [one for one in self._struck if not one["happened"]]
        failed = Counter(f"{one['kind']}: {one['note']}" for one in missed if one["note"] != faults.NO_VICTIM)
        book = self._book
        return {
            "seconds": round(seconds, 1),
            "seed": self._plan.seed,
            "stopped": stopped,
            **book.counts,
            "unfinished": unfinished if stopped else 0,
            "wrong": len(book.wrong),
            "failed": dict(book.failed),
            "first_wrong": book.wrong[:5],
            "driver_errors": book.errors,
            "crossed": crossed,
            "faults": dict(sorted(happened.items())),
            "faults_without_a_victim": len(missed) - failed.total(),
            "faults_that_failed": dict(failed),
            "longest_silence_s": round(self._watch.longest_silence_s(seconds), 1),
            "contained": dict(sorted(self._watch.contained.items())),
            "status_failures": dict(sorted(self._watch.failures.items())),
            "strikes": self._struck,
            "tokens_per_s": [(round(at_s, 1), round(rate, 1)) for at_s, rate in self._watch.rates],
            "rss": self.log.curves(),
        }


def clock(seconds: float) -> str:
    """Returns minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


async def _cancelled(*tasks: asyncio.Task) -> None:
    """Cancels tasks; the error of one that has ended with it is raised by its reader."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):  # it was cancelled, or its reader has the error
            await task
