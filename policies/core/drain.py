"""Replicas that keep older weights until the samples which began with them have ended: `kv_on_update: finish`.

When weights change, the replicas of the old version keep it. The samples that it has begun share one queue, which these
replicas alone serve, and new samples start on replicas of the newest version. A replica is let go, and so takes the
newest weights, once nothing runs there. One is emptied at once, so that new samples need not wait: its chunks continue
on the others. Later ones are emptied as samples end, so that the rest run no more to a replica than at the change.
Invariant: the last replica of a version is let go after all of its samples, those between two turns aside. If it is
lost, they continue under the newest weights. Samples that an earlier coordinator has begun have replicas keep their
weights again. Called by `RolloutCore` alone.
"""

from collections.abc import Iterable, Iterator

from tailrace.policies.core.fit_queue import STEP_TOKENS
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Group, RequestBuffer, Sample
from tailrace.policies.core.running_chunks import RunningChunks
from tailrace.policies.core.sample_states import RUNNING, WAITING
from tailrace.policies.core.scaling import empty, left_tokens
from tailrace.policies.core.wait_queue import WaitQueue
from tailrace.policies.families.kv_on_update import KvOnUpdate, finishes


class Drain:
    """`on`: whether samples end under the weights that they began with."""

    def __init__(
        self, policy: KvOnUpdate, table: ReplicaTable, waiting: WaitQueue, running: RunningChunks, buffer: RequestBuffer
    ):
        self.on = finishes(policy)
        self._table, self._waiting, self._running, self._buffer = table, waiting, running, buffer
        self._each: dict[int, int] = {}  # by kept version: samples to a replica as it was replaced
        self._emptied: set[str] = set()  # replicas on which no further chunk starts before they are let go

    def change(self, version: int) -> list[Sample]:
        """Changes the weights to `version`. Returns the waiting samples that are to be queued again."""
        old = self._table.weights_version
        self._table.change_weights(version, keep=self.on)
        if old not in self._table.kept:
            return []
        begun = [sample for sample in self._waiting.samples() if sample.first_version == old]
        replicas = self._table.kept[old]
        samples = len(begun) + sum(map(self._table.running, replicas))
        self._each[old] = max(1, -(-samples // max(1, len(replicas) - 1)))
        return begun

    def resume(self, groups: Iterable[Group]) -> None:
        """Has replicas keep the older weights of the samples of new groups that an earlier coordinator has begun."""
        begun = [(group.samples[one.index], one.version) for group in groups if self.on for one in group.spec.begun]
        for sample, version in begun:
            sample.first_version = version
        for version in sorted({version for _, version in begun if version is not None}):
            if replicas := self._table.keep_weights(version):
                samples = sum(one.first_version == version for one in self._unended())
                self._each[version] = max(1, -(-samples // replicas))

    def _unended(self) -> Iterator[Sample]:
        """Yields the samples that wait or run."""
        return (one for one in self._buffer.samples.values() if one.state in (WAITING, RUNNING))

    def kept_version(self, sample: Sample) -> int | None:
        """Returns the older version under which a waiting sample is to continue, or None for the newest: it has not
        begun, or no replica that keeps its weights could take its next chunk.
        """
        version = sample.first_version
        return version if version in self._table.kept and self._fits(sample, self.open_to(version)) else None

    def _fits(self, sample: Sample, replicas: Iterable[str]) -> bool:
        """Returns whether one of these replicas has room for a sample's next chunk, rounded up as queues do."""
        need = -(-sample.need_tokens // STEP_TOKENS) * STEP_TOKENS
        return max(map(self._table.whole_tokens, replicas), default=0) >= need

    def look(self) -> list[Sample] | None:
        """Lets go of idle replicas. Returns the waiting samples that are to be queued again, or None if there are none:
        those whose weights no replica keeps any more, which continue under the newest, and strays.
        """
        if not self._each:
            return None
        for version in sorted(self._table.kept):
            for replica_id in sorted(self._table.kept[version]):
                if not self._table.running(replica_id) and (replica_id in self._emptied or self._is_over(version)):
                    self._emptied.discard(replica_id)
                    self._table.let_go(replica_id)
        self._emptied &= {replica_id for kept in self._table.kept.values() for replica_id in kept}
        ended = [version for version in self._each if version not in self._table.kept]
        for version in ended:
            del self._each[version]
        evicted = [sample for version in ended for sample in self._waiting.evict(version)]
        strays = [sample for version in sorted(self._table.kept) for sample in self._strays(version)]
        return [*evicted, *strays] if ended or strays else None

    def starts(self) -> Iterator[tuple[Sample, str, str]]:
        """Yields each sample that ends under older weights and can start now, its replica and the reason; it is to be
        started before the next. Then empties replicas that these samples do not need any more.
        """
        for version in sorted(self._table.kept):
            while (roomiest := self._roomiest(version)) is not None:
                found = self._waiting.take_first(version, self._table.own_room_tokens(roomiest))
                if found is None:
                    break
                yield found, self._home(found) or roomiest, f"it ends under weights {version}"
            self._shrink(version)

    def _home(self, sample: Sample) -> str | None:
        """Returns the replica with a kept sample's KV, if it has room."""
        last = sample.last_replica
        stays = last in self.open_to(sample.kept_version) and self._table.own_room_tokens(last) >= sample.need_tokens
        return last if stays else None

    def _roomiest(self, version: int) -> str | None:
        return max(self.open_to(version), key=self._table.own_room_tokens, default=None)

    def open_to(self, version: int) -> list[str]:
        """Returns the replicas that keep a version and may start chunks of it, in order of ids."""
        kept = sorted(self._table.kept.get(version, ()))
        return [one for one in kept if one not in self._emptied and self._table.stays(one)]

    def _is_over(self, version: int) -> bool:
        """Returns whether no sample of a version waits or runs. O(samples), asked of idle replicas."""
        if not self._is_idle(version):
            return False
        begun, kept = (one for one in self._unended() if one.first_version == version), self._table.kept[version]
        return all(one in self._waiting and not self._fits(one, kept) for one in begun)

    def _is_idle(self, version: int) -> bool:
        return not (self._waiting.waiting_at(version) or any(map(self._table.running, self._table.kept[version])))

    def _strays(self, version: int) -> list[Sample]:
        """Returns the samples of a version that wait for others' replicas while those that keep it are idle. None of
        these could take them as they were queued, since all were set aside.
        """
        waiting = self._waiting.samples() if self._is_idle(version) else ()
        return [one for one in waiting if one.first_version == version and self.kept_version(one) is not None]

    def _shrink(self, version: int) -> None:
        """Empties the cheapest replicas of a version: those with the fewest samples, of these the shortest."""
        kept, free = self.open_to(version), self._table.staying > sum(map(len, self._table.kept.values()))
        free = free or bool(self._emptied)  # a replica has the newest weights, or is to have them
        waiting = self._waiting.waiting_at(version)
        samples = waiting + sum(map(self._table.running, self._table.kept[version]))
        wanted = max(1, -(-samples // self._each[version]))
        while len(kept) > wanted and not (waiting and free):
            cheapest = min(kept, key=self._cost)
            kept.remove(cheapest)
            if free and self._need(cheapest) > sum(map(self._table.own_room_tokens, kept)):
                return
            free = True
            self._emptied.add(cheapest)
            empty(cheapest, self._table, self._running, "is to take new weights")

    def _cost(self, replica_id: str) -> tuple[int, int, str]:
        chunks = [self._running.chunks[chunk_id] for chunk_id in self._table.chunks(replica_id)]
        return len(chunks), sum(map(left_tokens, chunks)), replica_id

    def _need(self, replica_id: str) -> int:
        return sum(self._running.chunks[chunk_id].kv_tokens for chunk_id in self._table.chunks(replica_id))
