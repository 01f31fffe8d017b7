"""One run of the shell simulation: a seed in, an outcome out.

A run checks that every driver ends once the faults are over, every token is right, no loop of the coordinator ends, no
task's exception stays unread, and nothing is left over in the books.
"""

import asyncio
import gc
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tailrace.deployments.messages.delivery import WINDOW_BYTES
from tailrace.deployments.staging.slots import SHARED_MEMORY
from tailrace.lab.fuzz.checks import Ledger, Wrong
from tailrace.lab.fuzz.cluster import SimulatedCluster, Size
from tailrace.lab.fuzz.drivers import DriverPlan, SimulatedDriver
from tailrace.lab.fuzz.faults import KINDS, Fault, FaultSite, schedule
from tailrace.lab.fuzz.log_disk import KINDS as LOG_DISKS
from tailrace.lab.fuzz.log_disk import LogDisk
from tailrace.lab.fuzz.odd.idle_watch import IdleWatch
from tailrace.lab.fuzz.odd.plan import PLAIN, Oddities, OddPlan
from tailrace.lab.fuzz.odd.policies import Trouble, oddly
from tailrace.lab.fuzz.virtual_time import Deadlock, Process, VirtualLoop
from tailrace.lab.fuzz.worlds.guests import guests
from tailrace.lab.fuzz.worlds.plan import MOST_OF_GUESTS, SCARCE_BLOCKS, WorldPlan, Worlds, by_kv, in_lanes, racing
from tailrace.lab.fuzz.worlds.plan import PLAIN as NO_WORLD
from tailrace.policies.families.kv_on_update import finishes
from tailrace.policies.protocol.exactness import Exactness

FAULTS_S = 60.0
"""Seconds of a run in which faults begin."""

END_S = 4000.0
"""Second by which every driver must have ended: a load of weights may wait 600 s for a replica, a step in vain for 60
s."""

SETTLE_S = 80.0
"""Seconds until nothing may be left over: a lease lasts 60 s, Ray takes a silent host for dead after 73 s."""

LATE_S = 5.0
"""Maximum seconds after the last late answer of an engine until it is taken."""

PROMPT = "reset", "strange_reserve"
"""Kinds of faults whose calls have returned by then: none of them waits for a replica, or for weights."""

LOOK_S = 5
"""Seconds between looks at samples that wait."""

FOLDER = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
"""Folder of the files of runs; None for the system's own. On a disk they take a quarter of the time of a run."""

NOISES = 0.01, 0.1, 0.5
"""Shares of positions at which two candidates are close, at exactness `law`; bfloat16 has some thousandths."""

SINGLES_SHARE = 0.3
ADAPTED_SHARE = 0.3
"""Share of drivers that load an adapter before each step."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run. `seed`: also decides latencies and boot times."""

    seed: int
    size: Size
    drivers: tuple[DriverPlan, ...]
    faults: tuple[Fault, ...]
    odd: OddPlan = PLAIN
    worlds: WorldPlan = NO_WORLD

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        return self.faults + self.odd.faults

    @property
    def keeps_replicas(self) -> bool:
        """True if coordinators alone are lost, and no sample has two turns."""
        odd = self.odd.raising or self.odd.company or self.size.limits or any(one.singles for one in self.drivers)
        return not odd and all(fault.kind == "coordinator" for fault in self.all_faults)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run. `problem`: one line, or None. `seconds`: virtual seconds until the last driver had ended."""

    seed: int
    problem: str | None
    faults: tuple[Fault, ...]
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0


def plan_of(
    seed: int, kinds: tuple[str, ...] = tuple(KINDS), singles: float = SINGLES_SHARE, exactness: Exactness = "bits"
) -> RunPlan:
    """Returns the plan of a seed. `kinds`: kinds of faults and oddities. `singles`: share of drivers that request
    single samples."""
    odd, worlds = Oddities(seed, kinds), Worlds(seed, kinds)
    asking, adapting = Random(f"singles/{seed}"), Random(f"adapters/{seed}")
    rng = Random(f"plan/{seed}")
    shares = Random(f"shares/{seed}")
    replicas = rng.randint(1, 4)
    policies = {
        "ordering": {"type": rng.choice(("fcfs", "seer", "remaining_first", "group_static"))},
        "placement": {"type": rng.choice(("least_kv", "round_robin", "cost_aware", "pinned"))},
        "chunking": {"type": "fixed", "chunk_tokens": rng.choice((8, 16, 64))},
        "kv_on_update": {"type": rng.choice(("fresh", "keep"))},
        "prefetch": {"type": rng.choice(("off", "next_up"))},
        "fairness": {"type": shares.choice(("fair_shares", "fair_shares", "one_queue"))},
    }
    limits = None
    if rng.random() < 0.3:
        limits = rng.randint(0, 1), replicas + 1
        policies["tail"] = {"type": rng.choice(("hold", "release", "consolidate", "auto"))}
    size = Size(
        replicas=replicas,
        limits=limits,
        pooled=rng.random() < 0.5,
        contexts=rng.random() < 0.5,
        mean_tokens=rng.choice((20, 60, 200)),
        step_tokens=rng.choice((1, 4, 16)),
        step_s=rng.choice((0.05, 0.2, 1.0)),
        kv_capacity_blocks=rng.choice((64, 400)),
        policies=policies,
        window_bytes=shares.choice((1, 20_000, WINDOW_BYTES)),
    )
    drivers = tuple(
        DriverPlan(
            name=f"d{number}",
            steps=rng.randint(1, 3),
            groups=rng.randint(1, 4),
            samples=rng.randint(1, 6),
            max_tokens=rng.choice((16, 64, 256)),
            updates=number == 0 and rng.random() < 0.6,
            until_s=FAULTS_S,
            pause_s=rng.choice((0.0, 2.0, 10.0)),
            seed=seed,
            priority=shares.choice((0, 0, 1)),
            share=shares.choice((0.5, 1.0, 4.0)),
            singles=asking.random() < singles,
            adapted=adapting.random() < ADAPTED_SHARE,
            impossible=odd.chosen("impossible", f"d{number}") is not None,
            hasty=odd.chosen("hasty", f"d{number}") is not None,
            grows=worlds.chosen("grown", f"d{number}") is not None,
            overtakes=worlds.chosen("overtaking", f"d{number}") is not None,
        )
        for number in range(rng.randint(1, 3))
    )
    of_faults = tuple(kind for kind in kinds if kind in KINDS)
    faults = schedule(rng, FAULTS_S, of_faults) if of_faults else ()
    if any(fault.kind == "policy" for fault in faults):
        size = replace(size, policies=oddly(policies))
    world = worlds.plan()
    most = [(driver.groups * driver.samples, driver.groups * driver.samples * driver.max_tokens) for driver in drivers]
    size = replace(size, quotas=world.bounds(*map(max, *most, MOST_OF_GUESTS)))
    if (races := worlds.chosen("races")) is not None:
        size = replace(size, **racing(races, size.policies))
    if (lanes := worlds.chosen("lanes")) is not None:
        size = replace(size, policies=in_lanes(lanes, size.policies))
    if worlds.chosen("finish") is not None:
        size = replace(size, policies=size.policies | {"kv_on_update": {"type": "finish"}})
    if (trajectories := worlds.chosen("trajectories")) is not None:
        size = replace(size, policies=by_kv(trajectories, size.policies))
    if "rewards" in world.guests:
        size = replace(size, contexts=True)
    if exactness == "law":
        size = replace(size, noise=Random(f"noise/{seed}").choice(NOISES))
    if worlds.chosen("scarce") is not None:
        size = replace(size, kv_capacity_blocks=SCARCE_BLOCKS)
    return RunPlan(
        seed=seed,
        size=size,
        drivers=drivers,
        faults=() if world.is_calm else faults,
        odd=odd.plan(FAULTS_S),
        worlds=world,
    )


def run(plan: RunPlan) -> Outcome:
    """Runs a plan on a loop of its own."""
    Trouble.family = None
    loop = VirtualLoop(Random(f"orders/{plan.seed}") if plan.odd.orders else None)
    ledger = Ledger()
    try:
        problem = loop.run_until_complete(_run(plan, ledger))
    except Deadlock as error:
        problem = str(error)
    seconds = loop.time()
    asyncio.set_event_loop(None)
    end_of(loop)
    problem = problem or next(iter(loop.errors), None)
    return Outcome(
        seed=plan.seed,
        problem=problem,
        faults=plan.all_faults,
        samples=ledger.samples,
        tokens=ledger.tokens,
        seconds=seconds,
    )


def end_of(loop: VirtualLoop) -> None:
    """Ends all tasks of a loop, and closes it."""
    while tasks := asyncio.all_tasks(loop):  # the end of a task may begin another
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    del tasks
    gc.collect()  # tasks with an unread exception report it now
    loop.close()


async def _run(plan: RunPlan, ledger: Ledger) -> str | None:
    with TemporaryDirectory(prefix="tailrace-fuzz-", dir=FOLDER) as folder:
        rng = Random(f"token log/{plan.seed}")
        log_disk = LogDisk(rng.choice(LOG_DISKS), Path(folder), rng)
        history = Path(folder) / "history"
        latency = Random(f"latency/{plan.seed}")
        cluster = SimulatedCluster(plan.size, latency, log_disk, history, plan.odd.culprits())
        cluster.one_version = (
            log_disk.kind == "sound" and plan.keeps_replicas and finishes(cluster.policies.kv_on_update)
        )
        return await _play(plan, ledger, cluster)


async def _play(plan: RunPlan, ledger: Ledger, cluster: SimulatedCluster) -> str | None:
    now = asyncio.get_running_loop().time
    drivers = [SimulatedDriver(one, cluster, ledger) for one in plan.drivers]
    running: dict[int, tuple[Process, asyncio.Task]] = {}

    def start(number: int) -> None:
        process = Process(f"driver-{number}")
        running[number] = process, process.spawn(drivers[number].run())

    def vanish(number: int, seconds: float) -> None:
        number %= len(drivers)
        process, task = running[number]
        if process.alive and not task.done():
            process.kill()
            asyncio.get_running_loop().call_later(seconds, start, number)

    for number in range(len(drivers)):
        start(number)
    calm = not (plan.all_faults or plan.odd.raising or plan.odd.company or plan.size.methods)
    visitors = guests(plan.seed, plan.worlds, cluster, ledger, calm)
    for number, guest in enumerate(visitors, len(drivers)):
        process = Process(f"guest-{guest.name}")
        running[number] = process, process.spawn(guest.run())
    site = FaultSite(cluster, ledger, vanish)
    calls = [(fault, cluster.controller.spawn(_later(site, fault))) for fault in plan.all_faults]
    watch = IdleWatch(cluster)
    while now() < END_S:
        await asyncio.sleep(1.0)
        idle = watch.problem(now()) if int(now()) % LOOK_S == 0 else None
        watched = idle or (cluster.account.problem() if cluster.account is not None else None)
        if (problem := _problem(cluster, running) or watched) is not None:
            return problem
        if all(one.ended for one in (*drivers, *visitors)):
            faults_end_s = max((fault.end_s for fault in plan.all_faults), default=0.0)
            await asyncio.sleep(max(0.0, faults_end_s - now()) + SETTLE_S)
            late_s = max((replica.late_until_s for replica in cluster.replicas.values()), default=0.0) - now()
            await asyncio.sleep(late_s + LATE_S if late_s > -LATE_S else 0.0)
            left_over = cluster.coordinator and _left_over(cluster, not plan.all_faults)
            left_over = left_over or (await cluster.shards.left_over() if cluster.shards else None)
            hangs = (fault for fault, call in calls if fault.kind in PROMPT and not call.done())
            hung = next((f"{fault.kind} at {fault.at_s} s: a call of it has not returned" for fault in hangs), None)
            return _problem(cluster, running) or left_over or hung
    late = [one.name for one in (*drivers, *visitors) if not one.ended]
    return f"after {END_S:.0f} s {late} have not ended; {_state(cluster)}"


async def _later(site: FaultSite, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    try:
        await site.do(fault)
    except Exception as error:  # noqa: BLE001 - a fault catches the errors that its own call may give
        site.cluster.defects.append(f"{fault.kind} got {error!r}")


def _problem(cluster: SimulatedCluster, running: dict) -> str | None:
    for process, task in running.values():
        if process.alive and task.cancelled():
            return f"{process.name} was cancelled, by nobody"
        if process.alive and task.done() and task.exception() is not None:
            error = task.exception()
            return str(error) if isinstance(error, Wrong) else f"a driver got {error!r}"
    return next(iter(cluster.defects), None)


def _left_over(cluster: SimulatedCluster, calm: bool) -> str | None:
    """Returns which entries are still in the books, a while after the last batch and the last fault, or None."""
    books = cluster.coordinator.rollouts.books()
    if any(books.values()):
        return f"left over in the coordinator: { {name: n for name, n in books.items() if n} }"
    if cluster.master and cluster.coordinator.rollouts.status().pool.status is None:
        return "the pool answers, and the coordinator has no status of it"
    if calm and (crowded := _crowded(cluster)):
        return crowded
    if cluster.pool and (cluster.master.keys or (calm and cluster.pool.swept and not cluster.size.methods)):
        return f"left over in the pool: {len(cluster.master.keys)} keys, and {cluster.pool.swept} were swept"
    for replica in cluster.replicas.values():
        if replica.stepper.busy and replica.hung_until_s < 1e8:
            return f"replica {replica.name} still runs {list(replica.loop.stats().running)}"
    return None


def _crowded(cluster: SimulatedCluster) -> str | None:
    """Returns which replica has had more to run than its KV holds, or None. No run without faults may show one (law
    5)."""
    most = {one.name: one.stepper.most_blocks for one in cluster.replicas.values()}
    bound = cluster.size.kv_capacity_blocks
    return next((f"{name} has had chunks of {n} blocks, of {bound}" for name, n in most.items() if n > bound), None)


def _state(cluster: SimulatedCluster) -> str:
    status = cluster.coordinator.rollouts.status() if cluster.coordinator else None
    if status is None:
        return "there is no coordinator"
    ready = [replica.replica_id for replica in status.replicas if replica.ready]
    return f"waiting {status.waiting}, running {status.running}, ready {ready}, waits_for {status.waits_for}"
