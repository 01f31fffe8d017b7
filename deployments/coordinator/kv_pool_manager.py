"""The coordinator's side of the KV pool: knows the blocks of each sample and prompt there, and releases them.

Invariant: a name that a replica has reported is released when the core says so. Blocks that were never reported (a
replica died while it saved, a save came late) are swept while no batch is in flight. The pool is a cache: when it is
down, nothing here waits or fails, and failures are counted. Owned by `Rollouts`; the pool itself is reached through its
KvMaster actor.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.batches.records import GroupRecord, SampleRecord, shared_tokens
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.errors import is_own_cancel
from tailrace.deployments.messages.status import PoolView
from tailrace.kvpool.keys import ALL_BLOCKS, NAME_BYTES, version_pattern
from tailrace.kvpool.status import PoolStatus
from tailrace.policies.protocol.actions import Prefetch, ReleaseKv
from tailrace.policies.protocol.events import Event, KvLost, PoolReported

AGAIN_S = 1.0
"""Seconds until an operation on a key that was in use is repeated; a lease lasts as long as a load may."""

DRAIN_S = 10.0

CALL_S = 10.0
"""Timeout, in seconds, of a call to the master. A dead Mooncake master is noticed after 4.3 s; one that is silent for
twice that is gone.
"""


MAX_GONE = 64
"""Departed replicas whose counts are kept separately, in case they return; older ones are summed."""

SUMMED_REPLICAS = 64
"""Number of replicas whose counts are summed anew after each poll; with N times as many, after N polls. A sum over 512
replicas takes 5 ms.
"""

MAX_TODO_KEYS = 2_000_000
"""Maximum number of keys in operations that wait for the master, about 200 MB: one that hangs takes CALL_S for each.
Blocks of further operations are evicted by the pool, or swept.
"""

MAX_EARLY = 4096
"""Operations kept until the first report, which comes within a poll."""

MAX_NODES = 4096
"""Maximum number of nodes whose store process is remembered. A loss on a node that was forgotten and comes back shows
as misses.
"""


class KvPoolManager:
    """`master`: handle of the KvMaster actor. Its methods return at once; `poll` and `work` run as tasks."""

    def __init__(self, master):
        self._master = master
        self._todo: deque[tuple[str, list]] = deque()  # queued operations of the master
        self._later: list[tuple[float, str, list]] = []  # operations to repeat, with their time
        self._todo_keys = 0
        self._awaited: list[tuple[bytes, int, list[SampleRecord]]] = []  # names, start, branches that may read them
        self._wake = asyncio.Event()
        self._prefixes: tuple[str, ...] = ()
        self._early: deque[tuple] = deque(maxlen=MAX_EARLY)  # operations on blocks before any prefix was known
        self._block_tokens = self._token_bytes = 0
        self._status: PoolStatus | None = None
        self._processes: dict[str, int | None] = {}  # pids: a new process does not have the old one's blocks
        self._idle_polls = 0
        self._engine_counts: dict[str, dict[str, int]] = {}
        self._problem: str | None = None
        self._problems: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._sum: Counter[str] | None = None  # of the engines' counts; None: it is due
        self._unsummed = 0  # number of times that reports were taken since the last sum

    # ---- called by Rollouts ------------------------------------------------------------------------

    def learn(self, reports: Iterable[EngineStats]) -> None:
        """Takes the key prefixes, the bytes per token and the engines' counts from reports."""
        self._problems, present = {}, set()
        for report in reports:
            present.add(report.replica_id)
            if report.pool_problem:
                self._problems[report.replica_id] = report.pool_problem
                continue
            self._prefixes, self._token_bytes = report.key_prefixes, report.token_bytes
            self._block_tokens = report.block_tokens
            self._engine_counts[report.replica_id] = report.kv_counts
        while self._prefixes and self._early:
            self._do(*self._early.popleft())
        gone = [name for name in self._engine_counts if name not in present]
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            self._counts.update(self._engine_counts.pop(name))
            self._sum = None
        self._unsummed += 1
        if self._unsummed * SUMMED_REPLICAS >= len(self._engine_counts):
            self._sum = None

    def perform(
        self, action: ReleaseKv | Prefetch, batch_of: Callable[[str], LiveBatch], reports: Mapping[str, EngineStats]
    ) -> None:
        """Performs an action of the core. `reports`: by replica; a prefetch for one that is lost does nothing."""
        if isinstance(action, ReleaseKv):
            self.release(batch_of(action.group_id), action)
        elif report := reports.get(action.replica_id):
            self.prefetch(batch_of(action.sample_id), action.sample_id, report.node_id)

    def release(self, batch: LiveBatch, action: ReleaseKv) -> None:
        """Releases a sample's own blocks, or the blocks of its group's prompt. The last of mates and of branches that
        began with the same tokens releases the blocks of these. Blocks that a branch is yet to read stay for it.
        """
        self._counts[f"releases.{action.cause}"] += 1
        group, sample_id = batch.groups[action.group_id], action.sample_id
        prompt_bytes = len(group.prompt) // max(1, self._block_tokens) * NAME_BYTES
        samples = group.samples if sample_id is None else [batch.samples[sample_id]]
        group.prompt_kv_names.update(sample.kv_names[:prompt_bytes] for sample in samples)
        namesakes = batch.namesakes(action.group_id)
        others = [names for other in namesakes for names in _kept_names(other)]
        if sample_id is None:
            contexts, start = [*group.prompt_kv_names], 0
            group.prompt_kv_names.clear()
        else:
            contexts, start = [samples[0].kv_names], prompt_bytes
            others += [mate.kv_names for mate in group.samples if mate is not samples[0]]
        for sample in samples:
            sample.kv_names = b""
        unread = [one for other in namesakes for one in other.samples if one.end is None and not one.kv_names]
        context = samples[0].context() if unread and sample_id is not None else group.prompt
        shared = [shared_tokens(context, one.prompt) // max(1, self._block_tokens) * NAME_BYTES for one in unread]
        for names in contexts:
            own = _own(names, others, start)
            first = len(names) - len(own)
            kept = max([first, *shared])
            if names[first:kept]:
                branches = [one for one, end in zip(unread, shared, strict=True) if end > first]
                self._awaited.append((names[:kept], first, branches))
            self._do("release", names[kept:])

    def _release_awaited(self) -> None:
        """Releases blocks that branches were yet to read, once their first chunks or they themselves have ended."""
        awaited, self._awaited = self._awaited, []
        for names, start, branches in awaited:
            if not all(one.kv_names or one.end is not None for one in branches):
                self._awaited.append((names, start, branches))
                continue
            others = [one.kv_names for one in branches if one.end is None or one.hold_s]
            others += [prompt for one in branches for prompt in one.group.prompt_kv_names]
            self._do("release", _own(names, others, start))

    def prefetch(self, batch: LiveBatch, sample_id: str, node_id: str) -> None:
        """Brings a sample's blocks into the memory of a node."""
        nodes = self._status.store_nodes if self._status else ()
        segment = next(
            (node.segment for node in nodes if node.node_id == node_id and node.segment and not node.leaving), None
        )
        if segment is None:
            self._counts["prefetch_failed.no_store"] += 1
        else:
            self._do("move", batch.samples[sample_id].kv_names, segment)

    def retire(self, weights_version: int) -> None:
        """Removes all blocks of a weights version; none of them will be read again."""
        self._push("retire", [version_pattern(weights_version)])
        self._later.append((self._clock() + AGAIN_S, "retire", [version_pattern(weights_version)]))

    def rest(self, idle: bool) -> None:
        """Sweeps the pool after two polls with nothing in flight: no block is read again. Called after each `poll`."""
        self._idle_polls = self._idle_polls + 1 if idle and not self._todo and not self._later else 0
        if self._idle_polls > 1:
            self._awaited.clear()
            if self._status is not None and self._status.keys:
                self._push("retire", [ALL_BLOCKS])

    async def drain(self) -> int:
        """Removes every key; keys in use as soon as they are free. Returns the number of removed keys."""
        removed, until_s = 0, self._clock() + DRAIN_S
        while self._clock() < until_s:
            removed += await self._ask("retire", ALL_BLOCKS) or 0
            if not await self._ask("keys_by_version"):
                break
            await asyncio.sleep(AGAIN_S / 2)
        return removed

    # ---- the loops ---------------------------------------------------------------------------------

    async def work(self) -> None:
        """Performs queued operations in order. Never returns."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._todo:
                method, arguments = self._todo[0]
                done = await self._ask(method, *arguments)
                self._todo.popleft()
                self._todo_keys -= _keys_of(arguments)
                if method == "release" and done is not None:
                    done, in_use = done
                    if in_use:
                        self._later.append((self._clock() + AGAIN_S, method, [in_use]))
                if arguments == [ALL_BLOCKS]:  # the pool's own count of keys has those of staged weights, too
                    self._counts["swept_keys"] += done or 0
                self._counts[f"{method}_failed" if done is None else f"{method}d_keys"] += 1 if done is None else done

    async def poll(self, now: float) -> list[Event]:
        """Polls the pool. Returns its events: how full it is, and whether it has lost blocks."""
        now_s = self._clock()
        due = [(method, arguments) for at_s, method, arguments in self._later if at_s <= now_s]
        self._later = [item for item in self._later if item[0] > now_s]
        for method, arguments in due:
            self._push(method, arguments)
        self._release_awaited()
        status: PoolStatus | None = await self._ask("status")
        self._status = status
        if status is None or not self._token_bytes:
            return []
        events: list[Event] = []
        stores = {node.node_id: node.pid for node in status.store_nodes if not node.leaving}
        processes = {"master": status.master_pid} | stores
        for node in status.store_nodes:
            if node.leaving:  # its keys move, so its next process has none to lose
                self._processes.pop(node.node_id, None)
        if any(self._processes.get(name, pid) != pid for name, pid in processes.items()):
            self._counts["lost"] += 1
            events.append(KvLost(now, None))
        self._processes = {name: pid for name, pid in self._processes.items() if name not in processes} | processes
        for name in list(self._processes)[: max(0, len(self._processes) - MAX_NODES)]:
            del self._processes[name]
        capacity, used = status.dram_capacity_bytes, status.dram_bytes
        if status.ssd_capacity_bytes:  # every block is written there too, and memory is evicted first
            capacity, used = status.ssd_capacity_bytes, status.ssd_bytes
        events.append(PoolReported(now, capacity // self._token_bytes, used // self._token_bytes, now))
        return events

    async def detail(self) -> PoolView:
        """Returns `view` with the number of keys of each weights version, which reads every key."""
        return self.view().model_copy(update={"keys_by_version": await self.keys_by_version()})

    async def keys_by_version(self) -> dict[int, int] | None:
        return await self._ask("keys_by_version")

    def view(self) -> PoolView:
        """Returns the counts of all replicas and of this manager, with the pool's own figures."""
        if self._sum is None:
            self._sum, self._unsummed = Counter(), 0
            for of_engine in self._engine_counts.values():
                self._sum.update(of_engine)
        counts = self._sum.copy()
        counts.update(self._counts)
        status = self._status.model_dump() if self._status else None
        return PoolView(
            status=status,
            token_bytes=self._token_bytes,
            counts=dict(sorted(counts.items())),
            problem=self._problem,
            problems=self._problems,
        )

    # ------------------------------------------------------------------------------------------------

    def _clock(self) -> float:
        return asyncio.get_running_loop().time()

    def _do(self, method: str, names: bytes, *rest) -> None:
        """Queues an operation on blocks, with all keys under which each block is kept."""
        if names and not self._prefixes:
            self._early.append((method, names, *rest))
            return
        hexes = [names[i : i + NAME_BYTES].hex() for i in range(0, len(names), NAME_BYTES)]
        if hexes:
            self._push(method, [[f"{prefix}@{name}" for prefix in self._prefixes for name in hexes], *rest])

    def _push(self, method: str, arguments: list) -> None:
        keys = _keys_of(arguments)
        if self._todo and self._todo_keys + keys > MAX_TODO_KEYS:
            self._counts[f"{method}_failed.too_many"] += 1
            return
        self._todo.append((method, arguments))
        self._todo_keys += keys
        self._wake.set()

    async def _ask(self, method: str, *arguments):
        """Returns the master's answer, or None if the call fails; `problem` then gives the cause."""
        try:
            answer = await asyncio.wait_for(getattr(self._master, method).remote(*arguments), CALL_S)
        except (Exception, asyncio.CancelledError) as error:  # the pool is a cache: none of its errors may spread
            if isinstance(error, asyncio.CancelledError) and is_own_cancel():
                raise
            cause = getattr(error, "cause", None) or error
            self._problem = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
            return None
        self._problem = None
        return answer


def _kept_names(group: GroupRecord) -> Iterator[bytes]:
    """Yields the names of the blocks that a group has not released, from their contexts' first on."""
    yield from group.prompt_kv_names
    for sample in group.samples:
        yield sample.kv_names


def _own(names: bytes, others: Iterable[bytes], start: int) -> bytes:
    """Returns the names from `start` bytes on that none of the others has."""
    return names[max([start, *(_end_of_common(names, other, start) for other in others)]) :]


def _end_of_common(names: bytes, others: bytes, start: int) -> int:
    """Returns where the names of two samples begin to differ, in bytes from `start` on. A name covers all tokens before
    it, so they differ from there on.
    """
    low, high = start // NAME_BYTES, min(len(names), len(others)) // NAME_BYTES
    while low < high:
        middle = (low + high) // 2
        place = slice(middle * NAME_BYTES, (middle + 1) * NAME_BYTES)
        low, high = (middle + 1, high) if names[place] == others[place] else (low, middle)
    return low * NAME_BYTES


def _keys_of(arguments: list) -> int:
    """Returns the number of keys of an operation; a pattern counts as one."""
    return len(arguments[0]) if isinstance(arguments[0], list) else 1
