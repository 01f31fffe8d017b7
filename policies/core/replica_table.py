"""The replicas and the KV reserved on them. Invariant (law 5): reserved blocks never exceed capacity.

A running chunk reserves its context, all tokens it may make and the replica's draft look-ahead until it
ends. A lazy heap finds the roomiest replica in O(log replicas). Called by the core and by placement policies.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from tailrace.policies.protocol.events import IllegalEvent, ReplicaJoined, ReplicaMeasured
from tailrace.policies.protocol.performance import Performance, chance
from tailrace.policies.protocol.views import ReplicaView


class _ReplicaRow:
    __slots__ = ("aside", "block_tokens", "capacity_blocks", "chunks", "closing", "draft_tokens", "entry",
                 "free_blocks", "held", "kept", "max_running", "methods", "node_id", "performance",
                 "started_at", "version")  # fmt: skip


class ReadOnlyReplicas:
    """Lookups of a ReplicaTable, as a `ReplicasView`. A policy with it can neither reserve nor close."""

    __slots__ = ("next_with_room", "performance", "ready", "room_tokens", "roomiest", "running")

    def __init__(self, table: "ReplicaTable"):
        for name in self.__slots__:
            setattr(self, name, getattr(table, name))


class ReplicaTable:
    """Records of every replica that joined and has not left. Placements see `read_only`."""

    def __init__(self, weights_version: int = 0):
        self.weights_version = weights_version
        self.kept: dict[int, set[str]] = {}  # older version -> replicas that keep it for samples that began with it
        self._replicas: dict[str, _ReplicaRow] = {}
        self._ids: list[str] = []
        self._nodes: Counter[str] = Counter()  # node -> replicas on it
        self._tests: dict[str, list[float]] = {}  # draft method -> right and tested tokens, replicas that report them
        self.staying = 0  # replicas that are not closing
        self.total_tokens = 0  # tokens of KV that all replicas hold together
        self.one_node = True  # True if all replicas share one node's pool memory: no KV is nearer to one of them
        self._roomy: list[tuple[int, str]] = []  # (-room, id), dead entries among them
        self.read_only = ReadOnlyReplicas(self)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    def join(self, event: ReplicaJoined) -> None:
        """Adds a replica, or updates the weights version and draft methods of a known one."""
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            replica = _ReplicaRow()
            replica.block_tokens, replica.draft_tokens = event.block_tokens, event.draft_tokens
            replica.capacity_blocks = replica.free_blocks = event.kv_capacity_blocks
            replica.max_running, replica.chunks, replica.entry = event.max_running, {}, None
            replica.node_id, replica.performance, replica.closing = event.node_id, None, False
            replica.aside, replica.kept, replica.held = "", None, {}
            replica.started_at = event.started_at
            self.total_tokens += event.kv_capacity_blocks * event.block_tokens
            self._count_node(event.node_id, 1)
            self._replicas[event.replica_id] = replica
            insort(self._ids, event.replica_id)
            self.staying += 1
        replica.version, replica.methods = event.weights_version, event.methods
        if replica.version == self.weights_version:
            self._unkeep(event.replica_id, replica)
        self._list(event.replica_id, replica)

    def leave(self, replica_id: str) -> list[str]:
        """Forgets a replica. Returns the ids of its chunks. Raises IllegalEvent if the replica is unknown."""
        replica = self._known(replica_id)
        self._unkeep(replica_id, replica)
        del self._replicas[replica_id]
        self._ids.remove(replica_id)
        self.staying -= not replica.closing
        self.total_tokens -= replica.capacity_blocks * replica.block_tokens
        self._count_node(replica.node_id, -1)
        self._count_tests(replica.performance, -1)
        return list(replica.chunks)

    def close(self, replica_ids: Iterable[str]) -> list[str]:
        """Closes these replicas to new chunks, and reopens all others. Returns the newly closed ones."""
        closing = set(replica_ids)
        changed = [i for i, replica in self._replicas.items() if replica.closing != (i in closing)]
        for replica_id in changed:
            replica = self._replicas[replica_id]
            replica.closing = not replica.closing
            self.staying += -1 if replica.closing else 1
            self._list(replica_id, replica)
        return sorted(i for i in changed if i in closing)

    def set_aside(self, replica_id: str, reason: str) -> None:
        """Sets a replica aside: nothing starts there until it is readmitted."""
        replica = self._known(replica_id)
        replica.aside = reason
        self._list(replica_id, replica)

    def readmit(self, replica_id: str) -> None:
        replica = self._known(replica_id)
        replica.aside = ""
        self._list(replica_id, replica)

    def aside(self, replica_id: str) -> str:
        """Returns why a replica is set aside; empty if it is not."""
        return self._known(replica_id).aside

    def stop_order(self) -> list[str]:
        """Returns the ids in the order in which Serve stops replicas."""
        oldest = sorted(self._replicas.items(), key=lambda one: one[1].started_at)  # one that is back is no newer
        return stop_order({replica_id: replica.node_id for replica_id, replica in oldest})

    def measure(self, event: ReplicaMeasured) -> None:
        """Records a replica's performance, unless a newer one is known (law 8). Raises IllegalEvent if it is
        unknown.
        """
        replica = self._known(event.replica_id)
        before = replica.performance
        if before is None or event.performance.observed_at >= before.observed_at:
            replica.performance = event.performance
            self._count_tests(before, -1)
            self._count_tests(event.performance, 1)

    def change_weights(self, version: int, keep: bool = False) -> None:
        """Changes the current weights. `keep`: replicas that hold them keep them, until `let_go`."""
        old, self.weights_version = self.weights_version, version
        if keep and version != old:
            self.keep_weights(old)
        self._rebuild()

    def keep_weights(self, version: int) -> int:
        """Has the replicas that hold older weights keep them, until `let_go`. Returns their number."""
        holders = [one for one in self._replicas.items() if one[1].version == version < self.weights_version]
        for replica_id, replica in holders:
            replica.kept = version
            self.kept.setdefault(version, set()).add(replica_id)
            self._list(replica_id, replica)
        return len(holders)

    def let_go(self, replica_id: str) -> None:
        """Ends the keeping of older weights on a replica: it is to load the current ones."""
        replica = self._replicas[replica_id]
        self._unkeep(replica_id, replica)
        self._list(replica_id, replica)

    def _unkeep(self, replica_id: str, replica: _ReplicaRow) -> None:
        if replica.kept is not None:
            self.kept[replica.kept].remove(replica_id)
            if not self.kept[replica.kept]:
                del self.kept[replica.kept]
            replica.kept = None

    def keeps(self, replica_id: str) -> bool:
        """Returns whether a replica, known or not, keeps older weights for samples that began with them."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.kept is not None

    def version_of(self, replica_id: str) -> int:
        """Returns the weights version of a known replica."""
        return self._replicas[replica_id].version

    def continued(self, first_version: int | None) -> int:
        """Returns the version under which a sample continues whose first token `first_version` made; None: no token
        is made yet.
        """
        return first_version if first_version in self.kept else self.weights_version

    def reserve(self, replica_id: str, chunk_id: str, need_tokens: int) -> None:
        """Books a chunk of `need_tokens` (context and new tokens). Raises ValueError if it does not fit."""
        replica = self._replicas[replica_id]
        blocks = -(-(need_tokens + replica.draft_tokens) // replica.block_tokens)
        if need_tokens > self.own_room_tokens(replica_id):
            raise ValueError(f"chunk {chunk_id} needs {need_tokens} tokens of KV; {replica_id} has not that room")
        replica.free_blocks -= blocks
        replica.chunks[chunk_id] = blocks
        self._list(replica_id, replica)

    def release(self, replica_id: str, chunk_id: str) -> None:
        replica = self._replicas[replica_id]
        replica.free_blocks += replica.chunks.pop(chunk_id)
        self._list(replica_id, replica)

    def keep(self, replica_id: str, sample_id: str, tokens: int) -> None:
        """Counts KV of a sample between two turns as taken; there is room for it."""
        replica = self._replicas[replica_id]
        blocks = replica.held[sample_id] = -(-tokens // replica.block_tokens)
        replica.free_blocks -= blocks
        self._list(replica_id, replica)

    def unkeep(self, replica_id: str, sample_id: str) -> None:
        """Counts kept KV as free."""
        replica = self._replicas[replica_id]
        replica.free_blocks += replica.held.pop(sample_id)
        self._list(replica_id, replica)

    def room_tokens(self, replica_id: str) -> int:
        """Returns the maximum number of tokens that a new chunk may need there; 0 if the replica is full, unknown,
        closing or set aside, or holds other weights.
        """
        replica = self._replicas.get(replica_id)
        return 0 if replica is None or replica.kept is not None else self.own_room_tokens(replica_id)

    def own_room_tokens(self, replica_id: str) -> int:
        """Returns the same of a known replica, for a sample of its own weights if it keeps older ones."""
        replica = self._replicas[replica_id]
        return 0 if replica.entry is None else -replica.entry[0]

    def roomiest(self) -> str | None:
        """Returns the roomiest ready replica (ties: lowest id), or None if none has room."""
        heap = self._roomy
        while heap:
            replica = self._replicas.get(heap[0][1])
            if replica is not None and replica.entry is heap[0]:
                return heap[0][1]
            heappop(heap)
        return None

    def next_with_room(self, after: str | None, need_tokens: int) -> str | None:
        """Returns the first replica after `after`, in cyclic order of ids, with room for `need_tokens`, or None."""
        start = 0 if after is None else bisect_right(self._ids, after)
        for replica_id in self._ids[start:] + self._ids[:start]:
            if self.room_tokens(replica_id) >= need_tokens:
                return replica_id
        return None

    def ready(self) -> list[str]:
        """Returns the ids, in order, of the replicas that hold the current weights and are neither closing nor set
        aside.
        """
        return [i for i in self._ids if self._is_ready(self._replicas[i])]

    def is_ready(self, replica_id: str) -> bool:
        """Returns whether a known replica holds the current weights and is neither closing nor set aside."""
        return self._is_ready(self._replicas[replica_id])

    def all_ready(self) -> bool:
        """Returns whether any replicas stay, and all of those hold the current weights."""
        stay = [replica for replica in self._replicas.values() if not replica.closing]
        return bool(stay) and all(map(self._is_ready, stay))

    def stays(self, replica_id: str) -> bool:
        """Returns whether a replica is present and neither closing nor set aside."""
        replica = self._replicas.get(replica_id)
        return replica is not None and not replica.closing and not replica.aside

    def is_closing(self, replica_id: str) -> bool:
        return self._replicas[replica_id].closing

    def chunks(self, replica_id: str) -> list[str]:
        """Returns the ids of the chunks that run there."""
        return list(self._replicas[replica_id].chunks)

    def capacity_tokens(self) -> int:
        """Returns the maximum number of tokens that a chunk could need on an empty replica, over all replicas; 0
        without replicas.
        """
        return max((r.capacity_blocks * r.block_tokens - r.draft_tokens for r in self._replicas.values()), default=0)

    def whole_tokens(self, replica_id: str) -> int:
        """Returns the maximum number of tokens that a chunk could need on this replica, if it was empty."""
        replica = self._replicas[replica_id]
        return replica.capacity_blocks * replica.block_tokens - replica.draft_tokens

    def running(self, replica_id: str) -> int:
        return len(self._replicas[replica_id].chunks)

    def max_running(self, replica_id: str) -> int:
        return self._replicas[replica_id].max_running

    def performance(self, replica_id: str) -> Performance | None:
        """Returns the replica's last measured performance, or None if it has not reported any."""
        return self._replicas[replica_id].performance

    def any_performance(self) -> Performance | None:
        """Returns the performance of the first ready replica that has reported any; those that know a draft model come
        first.
        """
        found = [known for i in self.ready() if (known := self._replicas[i].performance) is not None]
        return next((one for one in found if one.drafter_seconds), found[0] if found else None)

    def chance(self, method: str, prior: float) -> float:
        """Returns the chance that a draft token of a method is right if all before it are, over all replicas."""
        return chance(*self._tests.get(method, (0.0, 0.0))[:2], prior)

    def mean_chance(self) -> float:
        """Returns the chance that a draft token is right if all before it are, over all methods and replicas; 0 if none
        was tested.
        """
        right, tested = (sum(sums[place] for sums in self._tests.values()) for place in (0, 1))
        return min(1.0, right / tested) if tested > 0 else 0.0

    def methods(self, replica_id: str) -> tuple[str, ...]:
        """Returns the draft methods available on the replica; the first is the default."""
        return self._replicas[replica_id].methods

    def node(self, replica_id: str) -> str:
        return self._replicas[replica_id].node_id

    def view(self, replica_id: str) -> ReplicaView:
        replica = self._replicas[replica_id]
        return ReplicaView(
            replica_id=replica_id,
            kv_capacity_tokens=replica.capacity_blocks * replica.block_tokens,
            kv_free_tokens=replica.free_blocks * replica.block_tokens,
            running=len(replica.chunks),
            max_running=replica.max_running,
            weights_version=replica.version,
            node_id=replica.node_id,
            performance=replica.performance,
        )

    def views(self) -> list[ReplicaView]:
        return [self.view(replica_id) for replica_id in self._ids]

    def _count_node(self, node_id: str, replicas: int) -> None:
        self._nodes[node_id] += replicas
        self._nodes += Counter()  # drops nodes without replicas
        self.one_node = len(self._nodes) < 2

    def _count_tests(self, performance: Performance | None, sign: int) -> None:
        for one in performance.acceptance if performance is not None else ():
            sums = self._tests.setdefault(one.method, [0.0, 0.0, 0])
            sums[0] = max(0.0, sums[0] + sign * one.right)
            sums[1] = max(0.0, sums[1] + sign * one.tested)
            sums[2] += sign
            if not sums[2]:  # what remains is an error of rounding
                del self._tests[one.method]

    def _known(self, replica_id: str) -> _ReplicaRow:
        if replica_id not in self._replicas:
            raise IllegalEvent(f"replica {replica_id!r} is not here")
        return self._replicas[replica_id]

    def _is_ready(self, replica: _ReplicaRow) -> bool:
        return replica.version == self.weights_version and not replica.closing and not replica.aside

    def _is_keeper(self, replica: _ReplicaRow) -> bool:
        return replica.kept is not None and replica.version == replica.kept and not (replica.closing or replica.aside)

    def _room(self, replica: _ReplicaRow) -> int:
        if len(replica.chunks) >= replica.max_running or not (self._is_ready(replica) or self._is_keeper(replica)):
            return 0
        room = replica.free_blocks * replica.block_tokens - replica.draft_tokens
        return room if room > 0 else 0

    def _list(self, replica_id: str, replica: _ReplicaRow) -> None:
        """Puts the replica's present room on the heap. Its earlier entry becomes dead."""
        room = self._room(replica)
        replica.entry = (-room, replica_id) if room else None
        if replica.entry and replica.kept is None:
            heappush(self._roomy, replica.entry)
        if len(self._roomy) > 64 + 4 * len(self._ids):
            self._rebuild()

    def _rebuild(self) -> None:
        for replica_id, replica in self._replicas.items():
            room = self._room(replica)
            replica.entry = (-room, replica_id) if room else None
        self._roomy = [r.entry for r in self._replicas.values() if r.entry and r.kept is None]
        heapify(self._roomy)


def stop_order(nodes: Mapping[str, str]) -> list[str]:
    """Returns replicas in the order in which Serve stops them (ray.serve `_get_replicas_to_stop`).

    The node with the fewest replicas comes first; ties go to the node of the newest replica. On a node the newest
    replica comes first. Serve first checks whether a node is the cluster's head, which is not known here. `nodes`: node
    of each replica, oldest replica first.
    """
    newest, on = list(reversed(nodes)), Counter(nodes.values())
    at = {node: place for place, node in enumerate(dict.fromkeys(nodes[i] for i in newest))}
    return sorted(newest, key=lambda i: (on[nodes[i]], at[nodes[i]]))
