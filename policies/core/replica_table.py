"""The replicas and the KV reserved on them. Invariant (law 5): reserved blocks never exceed capacity.

A running chunk reserves its context, all tokens it may make and the replica's draft look-ahead until it
ends. A lazy heap finds the roomiest replica in O(log replicas). Called by the core and by placement policies.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from tailrace.policies.protocol.events import IllegalEvent, ReplicaJoined, ReplicaMeasured
from tailrace.policies.protocol.views import ReplicaSpeeds, ReplicaView


class _ReplicaRow:
    __slots__ = ("aside", "block_tokens", "capacity_blocks", "chunks", "closing", "draft_tokens", "entry",
                 "free_blocks", "max_running", "methods", "node_id", "speeds", "version")  # fmt: skip


class ReadOnlyReplicas:
    """Lookups of a ReplicaTable, as a `ReplicasView`. A policy with it can neither reserve nor close."""

    __slots__ = ("next_with_room", "ready", "room_tokens", "roomiest", "running", "speeds")

    def __init__(self, table: "ReplicaTable"):
        for name in self.__slots__:
            setattr(self, name, getattr(table, name))


class ReplicaTable:
    """Books of every replica that joined and has not left. Placements see `read_only`."""

    def __init__(self, weights_version: int = 0):
        self.weights_version = weights_version
        self._replicas: dict[str, _ReplicaRow] = {}
        self._ids: list[str] = []
        self._nodes: Counter[str] = Counter()  # node -> replicas on it
        self.staying = 0  # replicas that are not closing
        self.one_node = True  # all replicas share one node's pool memory: no KV is nearer to one of them
        self._roomy: list[tuple[int, str]] = []  # (-room, id), dead entries among them
        self.read_only = ReadOnlyReplicas(self)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    def join(self, event: ReplicaJoined) -> None:
        """Add a replica, or update the weights version and draft methods of a known one."""
        replica = self._replicas.get(event.replica_id)
        if replica is None:
            replica = _ReplicaRow()
            replica.block_tokens, replica.draft_tokens = event.block_tokens, event.draft_tokens
            replica.capacity_blocks = replica.free_blocks = event.kv_capacity_blocks
            replica.max_running, replica.chunks, replica.entry = event.max_running, {}, None
            replica.node_id, replica.speeds, replica.closing = event.node_id, None, False
            replica.aside = ""
            self._count_node(event.node_id, 1)
            self._replicas[event.replica_id] = replica
            insort(self._ids, event.replica_id)
            self.staying += 1
        replica.version, replica.methods = event.weights_version, event.methods
        self._list(event.replica_id, replica)

    def leave(self, replica_id: str) -> list[str]:
        """Forget a replica. Returns the ids of its chunks. Raises IllegalEvent if the replica is unknown."""
        replica = self._known(replica_id)
        del self._replicas[replica_id]
        self._ids.remove(replica_id)
        self.staying -= not replica.closing
        self._count_node(replica.node_id, -1)
        return list(replica.chunks)

    def close(self, replica_ids: Iterable[str]) -> list[str]:
        """Close these replicas to new chunks, and reopen all others. Returns the newly closed ones."""
        closing = set(replica_ids)
        changed = [i for i, replica in self._replicas.items() if replica.closing != (i in closing)]
        for replica_id in changed:
            replica = self._replicas[replica_id]
            replica.closing = not replica.closing
            self.staying += -1 if replica.closing else 1
            self._list(replica_id, replica)
        return sorted(i for i in changed if i in closing)

    def set_aside(self, replica_id: str, reason: str) -> None:
        """Start nothing on a replica until it is readmitted."""
        replica = self._known(replica_id)
        replica.aside = reason
        self._list(replica_id, replica)

    def readmit(self, replica_id: str) -> None:
        replica = self._known(replica_id)
        replica.aside = ""
        self._list(replica_id, replica)

    def aside(self, replica_id: str) -> str:
        """Why a replica is set aside; empty if it is not."""
        return self._known(replica_id).aside

    def stop_order(self) -> list[str]:
        """Ids in the order in which Serve stops replicas."""
        return stop_order({replica_id: replica.node_id for replica_id, replica in self._replicas.items()})

    def measure(self, event: ReplicaMeasured) -> None:
        """Note a replica's speeds, unless newer ones are known (law 8). Raises IllegalEvent if it is unknown."""
        replica = self._known(event.replica_id)
        if replica.speeds is None or event.observed_at >= replica.speeds.observed_at:
            replica.speeds = ReplicaSpeeds(
                prefill_tokens_s=event.prefill_tokens_s,
                fetch_tokens_s=event.fetch_tokens_s,
                fetch_base_s=event.fetch_base_s,
                step_base_s=event.step_base_s,
                step_per_chunk_s=event.step_per_chunk_s,
                observed_at=event.observed_at,
            )

    def change_weights(self, version: int) -> None:
        self.weights_version = version
        self._rebuild()

    def reserve(self, replica_id: str, chunk_id: str, need_tokens: int) -> None:
        """Book a chunk of `need_tokens` (context and new tokens). Raises ValueError if it does not fit."""
        replica = self._replicas[replica_id]
        blocks = -(-(need_tokens + replica.draft_tokens) // replica.block_tokens)
        if need_tokens > self.room_tokens(replica_id):
            raise ValueError(f"chunk {chunk_id} needs {need_tokens} tokens of KV; {replica_id} has not that room")
        replica.free_blocks -= blocks
        replica.chunks[chunk_id] = blocks
        self._list(replica_id, replica)

    def release(self, replica_id: str, chunk_id: str) -> None:
        replica = self._replicas[replica_id]
        replica.free_blocks += replica.chunks.pop(chunk_id)
        self._list(replica_id, replica)

    def room_tokens(self, replica_id: str) -> int:
        """Max tokens that a new chunk may need there; 0 if the replica is full, unknown or holds other weights."""
        replica = self._replicas.get(replica_id)
        return 0 if replica is None or replica.entry is None else -replica.entry[0]

    def roomiest(self) -> str | None:
        """The roomiest ready replica (ties: lowest id), or None if none has room."""
        heap = self._roomy
        while heap:
            replica = self._replicas.get(heap[0][1])
            if replica is not None and replica.entry is heap[0]:
                return heap[0][1]
            heappop(heap)
        return None

    def next_with_room(self, after: str | None, need_tokens: int) -> str | None:
        """The first replica after `after`, in cyclic order of ids, with room for `need_tokens`, or None."""
        start = 0 if after is None else bisect_right(self._ids, after)
        for replica_id in self._ids[start:] + self._ids[:start]:
            if self.room_tokens(replica_id) >= need_tokens:
                return replica_id
        return None

    def ready(self) -> list[str]:
        """Ids, in order, of the replicas that hold the current weights and are neither closing nor set aside."""
        return [i for i in self._ids if self._is_ready(self._replicas[i])]

    def is_ready(self, replica_id: str) -> bool:
        """Whether a known replica holds the current weights and is neither closing nor set aside."""
        return self._is_ready(self._replicas[replica_id])

    def all_ready(self) -> bool:
        """Whether any replicas stay, and all of those hold the current weights."""
        stay = [replica for replica in self._replicas.values() if not replica.closing]
        return bool(stay) and all(map(self._is_ready, stay))

    def stays(self, replica_id: str) -> bool:
        """Whether a replica is here and neither closing nor set aside."""
        replica = self._replicas.get(replica_id)
        return replica is not None and not replica.closing and not replica.aside

    def is_closing(self, replica_id: str) -> bool:
        return self._replicas[replica_id].closing

    def chunks(self, replica_id: str) -> list[str]:
        """Ids of the chunks that run there."""
        return list(self._replicas[replica_id].chunks)

    def capacity_tokens(self) -> int:
        """Max tokens that a chunk could need on an empty replica, over all replicas; 0 without replicas."""
        return max((r.capacity_blocks * r.block_tokens - r.draft_tokens for r in self._replicas.values()), default=0)

    def busy(self) -> int:
        """Number of replicas that run chunks."""
        return sum(1 for replica in self._replicas.values() if replica.chunks)

    def running(self, replica_id: str) -> int:
        return len(self._replicas[replica_id].chunks)

    def max_running(self, replica_id: str) -> int:
        return self._replicas[replica_id].max_running

    def speeds(self, replica_id: str) -> ReplicaSpeeds | None:
        """The replica's last measured speeds, or None if it has not reported any."""
        return self._replicas[replica_id].speeds

    def methods(self, replica_id: str) -> tuple[str, ...]:
        """Draft methods available on the replica; the first is the default."""
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
            speeds=replica.speeds,
        )

    def states(self) -> Counter[str]:
        """Number of replicas by state: closing, aside, busy (running chunks), idle, other_weights. For figures."""
        return Counter(map(self._state, self._replicas.values()))

    def _state(self, replica: _ReplicaRow) -> str:
        if replica.closing:
            return "closing"
        if replica.aside:
            return "aside"
        if replica.chunks:
            return "busy"
        return "idle" if replica.version == self.weights_version else "other_weights"

    def views(self) -> list[ReplicaView]:
        return [self.view(replica_id) for replica_id in self._ids]

    def _count_node(self, node_id: str, replicas: int) -> None:
        self._nodes[node_id] += replicas
        self._nodes += Counter()  # drops nodes without replicas
        self.one_node = len(self._nodes) < 2

    def _known(self, replica_id: str) -> _ReplicaRow:
        if replica_id not in self._replicas:
            raise IllegalEvent(f"replica {replica_id!r} is not here")
        return self._replicas[replica_id]

    def _is_ready(self, replica: _ReplicaRow) -> bool:
        return replica.version == self.weights_version and not replica.closing and not replica.aside

    def _room(self, replica: _ReplicaRow) -> int:
        if len(replica.chunks) >= replica.max_running or not self._is_ready(replica):
            return 0
        room = replica.free_blocks * replica.block_tokens - replica.draft_tokens
        return room if room > 0 else 0

    def _list(self, replica_id: str, replica: _ReplicaRow) -> None:
        """Put the replica's present room on the heap. Its earlier entry is dead from now on."""
        room = self._room(replica)
        replica.entry = (-room, replica_id) if room else None
        if replica.entry:
            heappush(self._roomy, replica.entry)
        if len(self._roomy) > 64 + 4 * len(self._ids):
            self._rebuild()

    def _rebuild(self) -> None:
        for replica_id, replica in self._replicas.items():
            room = self._room(replica)
            replica.entry = (-room, replica_id) if room else None
        self._roomy = [r.entry for r in self._replicas.values() if r.entry]
        heapify(self._roomy)


def stop_order(nodes: Mapping[str, str]) -> list[str]:
    """Replicas in the order in which Serve stops them (ray.serve `_get_replicas_to_stop`).

    The node with the fewest replicas comes first; ties go to the node of the newest replica. On a node the newest
    replica comes first. Serve looks first at whether a node is the cluster's head, which is not known here. `nodes`:
    node of each replica, oldest replica first.
    """
    newest, on = list(reversed(nodes)), Counter(nodes.values())
    at = {node: place for place, node in enumerate(dict.fromkeys(nodes[i] for i in newest))}
    return sorted(newest, key=lambda i: (on[nodes[i]], at[nodes[i]]))
