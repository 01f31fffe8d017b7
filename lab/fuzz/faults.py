"""Faults by seed: kinds, times and targets, and how each is done to a simulated cluster.

A schedule is a tuple of values, so that it can be shortened and printed.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from ray.exceptions import RayError, RayTaskError

from tailrace.app.calls.refused import WeightsRejected
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RolloutBatch
from tailrace.lab.fuzz.checks import Ledger
from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.lab.fuzz.disk import TORN, digest_of
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.odd.actor_faults import master_restarts, meets, shard_dies
from tailrace.lab.fuzz.odd.engine_faults import HARMLESS, OF_ENGINES
from tailrace.lab.fuzz.odd.policies import TROUBLES, Trouble
from tailrace.lab.fuzz.replica import DAMAGES, SimulatedReplica

OVERWRITTEN = "overwritten-"  # so begins the content of a weights folder that another process has written to


class Fault(NamedTuple):
    """A fault. `at_s`: second of the run. `target`: number of a replica or driver, modulo their count. `seconds`,
    `number`: their meaning depends on the kind."""

    at_s: float
    kind: str
    target: int
    seconds: float
    number: int

    @property
    def end_s(self) -> float:
        return self.at_s + (self.seconds if self.kind in LASTING else 0.0)


class FaultSite:
    """The target of faults. `vanish`: kills a driver by its number and revives it after some seconds."""

    def __init__(self, cluster: SimulatedCluster, ledger: Ledger, vanish: Callable[[int, float], None]):
        self.cluster, self.ledger, self.vanish = cluster, ledger, vanish
        self.now = asyncio.get_running_loop().time

    def replica(self, fault: Fault) -> SimulatedReplica | None:
        names = sorted(self.cluster.replicas)
        return self.cluster.replicas[names[fault.target % len(names)]] if names else None

    def digest(self, version: int) -> str:
        """Returns the digest that the service reports for `version`, or ''."""
        status = self.cluster.coordinator.rollouts.status()
        return status.weights_digest if status.weights_version == version else ""

    async def do(self, fault: Fault) -> None:
        self.cluster.culprits.excuses += fault.kind not in HARMLESS
        await (KINDS | OF_ENGINES)[fault.kind](self, fault)


async def _kill(site: FaultSite, fault: Fault) -> None:
    if replica := site.replica(fault):
        site.cluster.kill(replica.name)


def _for_a_while(field: str) -> Callable:
    async def do(site: FaultSite, fault: Fault) -> None:
        if replica := site.replica(fault):
            setattr(replica, field, max(getattr(replica, field), site.now() + fault.seconds))

    return do


async def _hang_for_ever(site: FaultSite, fault: Fault) -> None:
    if replica := site.replica(fault):
        replica.hung_until_s = 1e9


async def _refuse(site: FaultSite, fault: Fault) -> None:
    if replica := site.replica(fault):
        replica.stepper.refuses = "this replica cannot read its arguments"
        await asyncio.sleep(fault.seconds)
        replica.stepper.refuses = ""


async def _deadly(site: FaultSite, fault: Fault) -> None:
    """Makes a running sample deadly: from then on it ends its engine, and each engine that runs it later."""
    if (replica := site.replica(fault)) and (keys := replica.stepper.sample_keys):
        site.cluster.deadly.add(keys[fault.number % len(keys)])


async def _swallow(site: FaultSite, fault: Fault) -> None:
    if replica := site.replica(fault):
        replica.stepper.swallow(fault.number)


def _answer(text: Callable[[Fault], str]) -> Callable:
    async def do(site: FaultSite, fault: Fault) -> None:
        if replica := site.replica(fault):
            replica.answer_faults.append(text(fault))

    return do


async def _ray_error(site: FaultSite, fault: Fault) -> None:
    """Raises an error of Ray in the call that holds a replica's line, or of the engine in its next chunk."""
    if replica := site.replica(fault):
        if fault.number % 2:
            replica.hold_errors.put_nowait(fault.number // 2)
        else:
            replica.answer_faults.append(f"error:{('', 'down')[fault.number // 2 % 2]}")


async def _line_breaks(site: FaultSite, fault: Fault) -> None:
    """Breaks a connection, which is made again at once. Frames on the way are lost."""
    if replica := site.replica(fault):
        for way in replica.ways:
            way.cut()


async def _coordinator(site: FaultSite, fault: Fault) -> None:
    site.cluster.kill_coordinator()


async def _driver(site: FaultSite, fault: Fault) -> None:
    site.vanish(fault.target, fault.seconds)


async def _overwrite(site: FaultSite, fault: Fault) -> None:
    """Writes other weights into the folder of the present ones, as a trainer may. Writes the old ones back, unless the
    new ones have been adopted."""
    folders, version = site.cluster.disk.folders, site.ledger.version
    folder = f"w{version}"
    old = folders.get(folder, TORN)
    if old != TORN and not old.startswith(OVERWRITTEN):  # another trainer has done the same
        folders[folder] = TORN if fault.number % 3 == 0 else f"{OVERWRITTEN}{fault.number}"
        if unread := version in site.ledger.unread and folders[folder] != TORN:
            site.ledger.offered[version].add(folders[folder])  # the service cannot know any better
        await asyncio.sleep(fault.seconds)
        while unread and site.ledger.version == version and not site.digest(version):
            await asyncio.sleep(1.0)
        if not unread or site.digest(version) != digest_of(folders[folder]):
            folders[folder] = old


async def _strange_update(site: FaultSite, fault: Fault) -> None:
    """Requests an update that must be refused, or that changes nothing."""
    version = site.ledger.version
    site.cluster.disk.folders["torn"] = TORN
    attempts = [
        (version + 1, None), (version + 1, "nowhere"), (version + 1, "torn"), (2**40, "start"), (-1, "start"),
        ("x", "start"), (None, "start"), (0, "start"), (version + 1, {"a": 5}), (True, "start"),
    ]  # fmt: skip
    await _tolerated(driver_client(site.cluster).update_weights(*attempts[fault.number % 10]))


async def _same_version(site: FaultSite, fault: Fault) -> None:
    """Gives other weights the version that the trainer gives next, or has given."""
    version = max(1, site.ledger.version + fault.number % 2)
    folder = f"other-{version}"
    site.cluster.disk.folders[folder] = f"other-{version}"
    site.ledger.offered.setdefault(version, set()).add(f"other-{version}")
    await _tolerated(driver_client(site.cluster).update_weights(version, folder))


async def _strange_batch(site: FaultSite, fault: Fault) -> None:
    """Requests a batch that must be refused: it has values that no batch has, as an unchecked copy of a message may."""
    good = PromptGroup(prompt_id="p", token_ids=(1, 2), samples=1, max_tokens=4)
    batch = RolloutBatch(batch_id=f"strange-{fault.number}", groups=(good,))
    values = (
        {"groups": ()}, {"groups": "nonsense"}, {"groups": (good, good)}, {"batch_id": None}, {"seed": "x"},
        {"step": -1}, {"share": 0.0}, {"share": float("nan")}, {"priority": "high"}, {"weights_version": "newest"},
        {"min_weights_version": 10**6}, {"weights_version": 10**6},
    )  # fmt: skip
    of_group = (
        {"samples": 0}, {"samples": "eight"}, {"samples": 10**6}, {"max_tokens": -5}, {"max_tokens": "few"},
        {"token_ids": ()}, {"token_ids": ("x",)}, {"token_ids": (1, 10**9)}, {"token_ids": (1,) * 5000},
        {"token_ids": (-1,)}, {"prompt_id": ""}, {"prompt_id": None}, {"text": "1"}, {"token_ids": None, "text": "odd"},
        {"sampling": "greedy"}, {"forced_token_ids": ((1,), (2,))}, {"forced_token_ids": ((10**9,),)},
    )  # fmt: skip
    strange = [batch.model_copy(update=update) for update in values]
    strange += [batch.model_copy(update={"groups": (good.model_copy(update=update),)}) for update in of_group]
    strange += [None, "nonsense", {"batch_id": "b"}, RolloutBatch.model_construct(batch_id="b")]
    message = strange[fault.number % len(strange)]
    stream = site.cluster.handle().options(stream=True).rollout.remote(Role.TRAINER, message, "stranger", [])
    try:
        async for item in stream:
            if not isinstance(item, Rejected):
                site.cluster.defects.append(f"{message!r} was taken")
    except RayTaskError as raised:
        site.cluster.defects.append(f"{message!r} made the coordinator raise {raised.cause!r}")
    except RayError:  # the coordinator is lost
        return


async def _strange_reserve(site: FaultSite, fault: Fault) -> None:
    values = (2.0, None, "2", -1, 10**9, 2, float("nan"), 0)
    await _tolerated(driver_client(site.cluster).reserve(values[fault.number % len(values)]))


async def _join(site: FaultSite, fault: Fault) -> None:
    site.cluster.boot(fault.seconds / 10)


async def _reset(site: FaultSite, fault: Fault) -> None:
    await _tolerated(driver_client(site.cluster).reset_caches())


PAUSED_S = 0.1
"""Minimum seconds of a pause, so that it arrives before the resume: two calls at the same time have no order."""


async def _pause(site: FaultSite, fault: Fault) -> None:
    """Pauses the service for a while, as a trainer does, and resumes it whatever became of the pause; or puts it to
    sleep, and wakes it until it is awake."""
    client = driver_client(site.cluster)
    if fault.number % 4 == 3:
        sleep = asyncio.ensure_future(_tolerated(client.sleep("keep")))
        await asyncio.sleep(fault.seconds)
        await sleep
        await _tolerated(client.wake_up())
        while (await client.status()).asleep:
            await asyncio.sleep(1.0)
            await _tolerated(client.wake_up())
        return
    pause = asyncio.ensure_future(_tolerated(client.pause(("keep", "wait")[fault.number % 2])))
    await asyncio.sleep(max(PAUSED_S, fault.seconds))
    await _tolerated(client.resume())  # refused if another trainer has put the service to sleep; its waking resumes it
    await pause


async def _policy(site: FaultSite, fault: Fault) -> None:
    """Makes a policy of the user's own fail for a while. It may end batches."""
    site.ledger.policies_failed = True
    Trouble.family, Trouble.number = TROUBLES[fault.target % len(TROUBLES)], fault.number
    await asyncio.sleep(fault.seconds)
    Trouble.family = None


async def _tolerated(call) -> None:
    """Awaits a call that may be refused; only its effects are checked."""
    try:
        await asyncio.wait_for(call, 700.0)
    except (RayError, WeightsRejected, ValueError, TypeError, TimeoutError):
        return


KINDS: dict[str, Callable] = {
    "kill": _kill,
    "hang": _for_a_while("hung_until_s"),
    "hang_for_ever": _hang_for_ever,
    "silence": _for_a_while("silent_until_s"),
    "partition": _for_a_while("parted_until_s"),
    "slow": _for_a_while("slow_until_s"),
    "refuse": _refuse,
    "late": _answer(lambda fault: f"late:{fault.seconds}"),
    "twice": _answer(lambda fault: "twice"),
    "ray_error": _ray_error,
    "line_breaks": _line_breaks,
    "damaged": _answer(lambda fault: f"damaged:{fault.number % DAMAGES}"),
    "coordinator": _coordinator,
    "driver": _driver,
    "shard_dies": shard_dies,
    "actor_down": meets("down"),
    "actor_hangs": meets("hangs"),
    "actor_odd": meets("odd"),
    "master_restarts": master_restarts,
    "overwrite": _overwrite,
    "strange_update": _strange_update,
    "same_version": _same_version,
    "strange_reserve": _strange_reserve,
    "join": _join,
    "reset": _reset,
    "swallow": _swallow,
    "policy": _policy,
    "strange_batch": _strange_batch,
    "pause": _pause,
    "deadly": _deadly,
}

LASTING = {
    "hang", "silence", "partition", "slow", "refuse", "late", "driver", "actor_down", "actor_hangs", "actor_odd",
    "overwrite", "join", "policy", "pause",
}  # fmt: skip
"""Kinds that last for their `seconds`."""


def schedule(rng: Random, until_s: float, kinds: tuple[str, ...] = tuple(KINDS)) -> tuple[Fault, ...]:
    """Returns up to 12 faults of a few of the kinds, in order of time."""
    chosen = rng.sample(kinds, rng.randint(1, min(6, len(kinds))))  # swarm testing: few kinds per run
    faults = [
        Fault(
            at_s=round(rng.uniform(0.5, until_s), 2),
            kind=rng.choice(chosen),
            target=rng.randrange(100),
            seconds=round(rng.choice((0.5, 5.0, 40.0, 150.0)) * rng.random(), 2),
            number=rng.randrange(1000),
        )
        for _ in range(rng.randint(0, 12))
    ]
    return tuple(sorted(faults))
