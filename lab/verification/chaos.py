"""The pool disturbed under a running rollout: every sample must end, with the tokens of the undisturbed run, in time.

Each disturbance must leave its signs in the counts: one without signs proves nothing, and fails. Every sample moves at
every chunk, so that look-ups, loads and saves continue all the time. Called by `tailrace pool chaos`.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile
from tailrace.app.summary import summarise
from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.deployments.messages.status import PoolView
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.lab.verification.runs import chunked
from tailrace.lab.verification.tokens import REPORTED_S, compare
from tailrace.policies.families.registry import Policies

POLICIES = chunked(16, "off", "round_robin")

HEAL_S = 30.0
"""Longest wait in seconds for the pool to be whole before a disturbance: a store that was lost mounts again within 4
s.
"""

RUN_S = 180.0
"""Longest time in seconds of a rollout: this workload takes 20 s; one that has not ended by then is stuck."""

FROZEN_S = 2.5
"""Seconds of a freeze: longer than a load may take, shorter than the 3 s after which the master gives up a silent
store.
"""

BUSY_S = 0.4

GRACE_MS = 500
"""Milliseconds by which a wait may exceed its deadline, unless the longest engine step is more: the engine looks
between two steps.
"""

TOLD = ("_failed", "recomputed_tokens.", "pool_tokens", "local_tokens", "save_late", "lost", "evicted", "refused")
"""Parts of the names of the counts that tell the fate of KV."""

Pids = Callable[[PoolView], list[int]]


def stores(view: PoolView) -> list[int]:
    return [node["pid"] for node in view.status["store_nodes"] if node["pid"] and node["segment"]]


def master(view: PoolView) -> list[int]:
    return [view.status["master_pid"]] if view.status["master_pid"] else []


def both(view: PoolView) -> list[int]:
    return master(view) + stores(view)


async def kill(pids: list[int]) -> None:
    """Kills the processes. Returns once they have ended: giving back a store's memory takes a while, in which it would
    still pass as alive.
    """
    _signal(pids, signal.SIGKILL)
    while any(running([pid]) for pid in pids):
        await asyncio.sleep(0.01)


async def kill_busy(pids: list[int]) -> None:
    """Stops the processes for a moment before it kills them, so that look-ups, loads and saves are under way."""
    _signal(pids, signal.SIGSTOP)
    await asyncio.sleep(BUSY_S)
    await kill(pids)


async def freeze(pids: list[int]) -> None:
    """Stops the processes for a while, in which loads and saves neither fail nor end."""
    _signal(pids, signal.SIGSTOP)
    try:
        await asyncio.sleep(FROZEN_S)
    finally:
        _signal(pids, signal.SIGCONT)


def running(pids: list[int]) -> bool:
    """Returns whether they all run: the pool's status still names a process for a moment after it was killed."""
    try:
        return all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    except psutil.NoSuchProcess:
        return False


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """`do` is done to the processes `whom` each time that a share `when` of the tokens is there.

    `signs`: parts of the names of counts; one or more of them must grow. `pool`: settings of the pool that differ.
    """

    name: str
    signs: tuple[str, ...]
    do: Callable[[list[int]], Awaitable[None]] | None = None
    whom: Pids = stores
    when: tuple[float, ...] = ()
    pool: tuple[tuple[str, object], ...] = ()

    async def act(self, client: RolloutClient, batch_id: str, tokens: int) -> str:
        """Disturbs the running batch, which has this many tokens in all. Returns a note on the disturbance."""
        done = []
        for share in self.when:
            view = await _moment(client, batch_id, share * tokens, self.whom)
            if view is not None:
                pids = self.whom(view)
                await self.do(pids)
                done.append(f"{self.do.__name__} {' '.join(map(str, pids))} at {view.status['keys']} keys")
        return "; ".join(done) or ", ".join(f"{key} {value}" for key, value in self.pool)


LOST = ("store_lost", "master_lost", "pull_failed.")

DISTURBANCES = (
    Disturbance("undisturbed", ("pool_tokens",)),
    Disturbance("store_killed", LOST, kill, stores, (0.15, 0.4, 0.65)),
    Disturbance("store_killed_busy", LOST, kill_busy, stores, (0.15, 0.4, 0.65)),
    Disturbance("store_frozen", ("pull_failed.late", "save_late"), freeze, stores, (0.2, 0.5)),
    Disturbance("master_killed", LOST, kill, master, (0.2, 0.6)),
    Disturbance("both_killed", LOST, kill, both, (0.4,)),
    Disturbance("pool_full", ("save_failed.full",), pool=(("dram_gib", 1 / 16),)),  # some 40 blocks of the demo model
    Disturbance("ssd_read_only", ("ssd_refused",), pool=(("ssd_path", "/sys/tailrace"),)),  # no process can write there
)
"""The first is the reference. Those with the same settings share one service."""


def measure(file: ServeFile, batch: RolloutBatch, names: tuple[str, ...], say: Callable[[str], None]) -> dict:
    """Rolls out the batch undisturbed, then under each named disturbance; under all of them when none is named."""
    wanted = [d for d in DISTURBANCES if d is DISTURBANCES[0] or not names or d.name in names]
    expected, runs = None, []
    for settings in dict.fromkeys(d.pool for d in wanted):
        say(f"starting two replicas{f' with {dict(settings)}' if settings else ''}")
        with service(_with_pool(file, dict(settings)), None) as client:
            for disturbance in (d for d in wanted if d.pool == settings):
                groups, run = asyncio.run(_roll(client, disturbance, batch, expected))
                expected = expected or groups
                run |= compare(expected, groups, exactness=file.application.args.engine.exactness)
                run["wrong"] = wrong(disturbance, run, batch, file.application.args.pool)
                runs.append(run)
                say(f"{run['name']}: {run['wrong'] or 'well'}, {run['makespan_s']} s; {run['done']}")
    samples = sum(group.samples for group in batch.groups)
    return {"well": not any(run["wrong"] for run in runs), "samples": samples, "runs": runs}


async def _roll(client: RolloutClient, disturbance: Disturbance, batch: RolloutBatch, expected) -> tuple[list, dict]:
    """Returns the ended groups, and the report of the run without the comparison."""
    before = (await _whole(client)).counts
    await client.reset_caches()
    await client.set_policies(Policies(**POLICIES))
    batch = batch.model_copy(update={"batch_id": f"chaos-{disturbance.name}"})
    tokens = summarise(expected)["tokens"] if expected else 0
    acting = asyncio.create_task(disturbance.act(client, batch.batch_id, tokens))
    groups = []
    try:
        async with asyncio.timeout(RUN_S):
            async for group in client.rollout(batch):
                groups.append(group)
    except TimeoutError:
        acting.cancel()
    done = (await asyncio.gather(acting, return_exceptions=True))[0]
    await asyncio.sleep(REPORTED_S)
    after = await _whole(client)
    counts = Counter(after.counts) - Counter(before)
    counts["ssd_refused"] = sum(node["ssd"] not in ("on", "off") for node in after.status["store_nodes"])
    summary = summarise(groups)
    return groups, {
        "name": disturbance.name,
        "done": str(done),
        "acted": not isinstance(done, BaseException),
        "samples_ended": summary["samples"],
        "failed": summary.get("finish_reasons", {}).get("failed", 0),
        "makespan_s": summary.get("makespan_s"),
        "counts": {name: counts[name] for name in sorted(counts) if counts[name] and any(p in name for p in TOLD)},
        "longest_wait_ms": longest_waits(counts),
        "ssd": sorted({node["ssd"] for node in after.status["store_nodes"]}),
    }


async def _whole(client: RolloutClient) -> PoolView:
    """Returns the pool once its processes run and its memory is mounted; TimeoutError after HEAL_S."""
    async with asyncio.timeout(HEAL_S):
        while True:
            view = (await client.status()).pool
            if view.status and master(view) and stores(view) and view.status["dram_capacity_bytes"]:
                return view
            await asyncio.sleep(0.2)


async def _moment(client: RolloutClient, batch_id: str, tokens: float, whom: Pids) -> PoolView | None:
    """Returns the pool once the batch has this many tokens and processes hold KV, or None if the batch ended before."""
    begun = False
    while True:
        status = await client.status()
        batch = next((b for b in status.batches if b.batch_id == batch_id), None)
        begun = begun or batch is not None
        if begun and batch is None:
            return None
        view = status.pool
        has_kv = view.status and view.status["keys"] and stores(view)
        if batch and batch.tokens >= tokens and has_kv and whom(view) and running(whom(view)):
            return view
        await asyncio.sleep(0.05)


def longest_waits(counts: Counter[str]) -> dict[str, int]:
    """Returns the bucket, in milliseconds, of the longest wait of each kind: the wait is above half of it, and not
    above it.

    `step` is the longest engine step, a measure of the load of the machine.
    """
    longest = {}
    for what, name in (("lookup", "lookup_wait"), ("pull", "pull_wait"), ("save", "hold"), ("step", "step")):
        of_kind = (key.rpartition(".") for key, count in counts.items() if count)
        longest[what] = max((int(bucket) for kind, _, bucket in of_kind if kind == f"{name}_ms"), default=0)
    return longest


def wrong(disturbance: Disturbance, run: dict, batch: RolloutBatch, pool: PoolConfig) -> str | None:
    """Returns the faults of the run, in one line."""
    wanted = sum(group.samples for group in batch.groups)
    if run["samples_ended"] < wanted or run["failed"]:
        return f"{run['samples_ended']} of {wanted} samples ended, {run['failed']} of them failed"
    if not run["acted"]:
        return f"its disturbance failed: {run['done']}"
    if not run["holds"]:
        at = run["first_difference"]
        return f"prompt {at['prompt_id']!r} sample {at['sample_index']} differs at position {at['position']}"
    if not any(sign in name for name in run["counts"] for sign in disturbance.signs):
        return f"hit nothing: none of {', '.join(disturbance.signs)} has grown"
    deadlines_s = {"lookup": pool.lookup_deadline_s, "pull": pool.load_deadline_s, "save": pool.save_deadline_s}
    longest_ms = run["longest_wait_ms"]
    for what, deadline_s in deadlines_s.items():
        allowed_ms = deadline_s * 1000 + max(GRACE_MS, longest_ms["step"])
        if longest_ms[what] / 2 > allowed_ms:
            return f"a {what} was waited for more than {longest_ms[what] // 2} ms, at most {allowed_ms:.0f} are allowed"
    return None


def _with_pool(file: ServeFile, changes: dict) -> ServeFile:
    """Returns the configuration with other settings of the pool."""
    application = file.application
    pool = PoolConfig.model_validate(application.args.pool.model_dump() | changes)
    return file.model_copy(update={"applications": (application.with_args(pool=pool),)})
