"""Waiting samples, in the order of the ordering policy. Unbound samples share one set of lanes; each replica with bound
samples has another. If the fairness policy sets batches apart, each batch has its own set in these places.

Keys of a lane are renewed when a sample of the group finishes. In growing lanes, keys that have grown are found when
their sample is about to be taken (see the contract in `policies.families.ordering`). Called by `RolloutCore` alone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter

from tailrace.policies.core.fit_queue import MAX_NEED_TOKENS, FitQueue
from tailrace.policies.core.request_buffer import Batch, Group, Sample
from tailrace.policies.families.fairness import Fairness
from tailrace.policies.families.ordering import OracleLongestFirst, Ordering
from tailrace.policies.families.registry import name_of
from tailrace.policies.protocol.events import IllegalEvent
from tailrace.policies.protocol.views import GroupView, SampleView

PRIORITY = attrgetter("group.batch.priority")


class WaitQueue:
    """Queues by place (`Sample.place`) and batch; each has a FitQueue per lane over the same samples."""

    def __init__(self, ordering: Ordering, fairness: Fairness):
        self._ordering, self._growing = ordering, ordering.growing_lanes
        self._fairness, self._apart = fairness, fairness.apart
        self.is_oracle = isinstance(ordering, OracleLongestFirst)
        self._lengths: dict[str, int] = {}
        self._queues: dict[str | int | None, dict[Batch | None, list[FitQueue]]] = {}  # batch None: all of them
        self._samples: dict[str, Sample] = {}
        self._lanes: dict[str, list[FitQueue]] = {}  # by waiting sample: the queues that it is in
        self._changed: dict[str, None] = {}  # homes whose room or queue has changed; an ordered set
        self._turns: dict[Batch, tuple[int, tuple]] = {}  # key of a batch that is set apart, with its running tokens
        self._picks = 0

    def reveal(self, lengths: Mapping[str, int]) -> None:
        """Takes true lengths for the ordering that needs them. Raises IllegalEvent for every other ordering."""
        if not self.is_oracle:
            raise IllegalEvent(f"ordering {name_of(self._ordering)} must not see true lengths (law 3)")
        self._lengths.update(lengths)

    def check_new(self, sample_ids: Iterable[str]) -> None:
        """Checks new samples. Raises IllegalEvent if the ordering needs true lengths and has none of one of them."""
        for sample_id in sample_ids if self.is_oracle else ():
            if sample_id not in self._lengths:
                raise IllegalEvent(f"{sample_id}: {name_of(self._ordering)} needs true lengths, has none")

    def forget(self, group: Group) -> None:
        """Removes the true lengths of a group that has been emitted."""
        if self._lengths:
            for sample in group.samples:
                self._lengths.pop(sample.sample_id, None)

    def forget_batch(self, batch: Batch) -> None:
        """Forgets the queues of a batch that is over."""
        self._turns.pop(batch, None)
        for queues in self._queues.values() if self._apart else ():
            queues.pop(batch, None)

    def __len__(self):
        return len(self._samples)

    def __contains__(self, sample: Sample) -> bool:
        return sample.sample_id in self._samples

    def by_priority(self, priorities: set[int]) -> Counter[int]:
        """Returns the number of queued samples by the priority of their batch. `priorities`: those of all batches;
        O(queued samples) with several.
        """
        if len(priorities) > 1:
            return Counter(map(PRIORITY, self._samples.values()))
        return Counter(dict.fromkeys(priorities, len(self._samples)))

    def samples(self) -> list[Sample]:
        """Returns all waiting samples, in order of arrival."""
        return sorted(self._samples.values(), key=lambda s: (s.group.arrival, s.index))

    def put(self, sample: Sample, view: SampleView) -> None:
        """Queues a waiting sample, or renews its need and keys. `view`: its present view."""
        self._push(sample, view)
        if sample.kept_version is None:
            self.look_at(sample.home)

    def _push(self, sample: Sample, view: SampleView) -> None:
        queues, batch = self._queues.setdefault(sample.place, {}), sample.group.batch if self._apart else None
        if batch not in queues:
            queues[batch] = [FitQueue() for _ in range(self._ordering.lanes)]
        if self._lanes.get(sample.sample_id, queues[batch]) is not queues[batch]:
            self.drop(sample)  # it is queued in another place
        for queue, key in zip(queues[batch], self._keys(view, sample.group.view()), strict=True):
            queue.push(sample.sample_id, sample.need_tokens, key)
        self._samples[sample.sample_id], self._lanes[sample.sample_id] = sample, queues[batch]

    def drop(self, sample: Sample) -> None:
        """Removes a sample, if it waits here."""
        if self._samples.pop(sample.sample_id, None) is not None:
            for queue in self._lanes.pop(sample.sample_id):
                queue.remove(sample.sample_id)

    def renew(self, group: Group, mates: Iterable[Sample]) -> None:
        """Renews the keys of the waiting mates of a finished sample."""
        view = group.view()
        for mate in mates:
            if mate.sample_id in self._samples:
                for queue, key in zip(self._lanes[mate.sample_id], self._keys(mate.view(), view), strict=True):
                    if key != queue.key(mate.sample_id):
                        queue.push(mate.sample_id, mate.need_tokens, key)

    def waiting_at(self, place: str | int) -> int:
        """Returns the number of samples that wait in one place."""
        return sum(len(lanes[0]) for lanes in self._queues.get(place, {}).values())

    def evict(self, place: str | int) -> list[Sample]:
        """Removes and returns all samples of a replica that has left, or of weights that no replica keeps, in order of
        arrival.
        """
        if self._queues.pop(place, None) is None:
            return []
        gone = [sample for sample in self.samples() if sample.place == place]
        for sample in gone:
            del self._samples[sample.sample_id], self._lanes[sample.sample_id]
        return gone

    def look_at(self, home: str | None) -> None:
        """Records that the room of a replica, or its bound samples, has changed."""
        if home is not None and home in self._queues:
            self._changed[home] = None

    def homes(self) -> list[str]:
        """Returns the replicas to consider since the last call, in order of ids."""
        homes, self._changed = sorted(self._changed), {}
        return [home for home in homes if home in self._queues]

    def take_first(self, place: str | int | None, room_tokens: int) -> Sample | None:
        """Removes and returns the first sample in a place that fits `room_tokens`, or None if there is none."""
        for queues in self._in_turn(place) if room_tokens else ():
            sample = self._peek(queues, room_tokens)
            if sample is not None:
                self._picks += 1
                self.drop(sample)
                return sample
        return None

    def _in_turn(self, place: str | int | None) -> Iterable[list[FitQueue]]:
        """Returns the queues of a place with waiting samples, by the fairness policy; batches of equal keys in order of
        arrival.

        Old batches have few waiting samples: the rest of them run.
        """
        queues = self._queues.get(place, {})
        if len(queues) < 2:
            return queues.values()
        waiting = [batch for batch, lanes in queues.items() if len(lanes[0])]
        return [queues[batch] for batch in sorted(waiting, key=self._turn)]

    def _turn(self, batch: Batch) -> tuple:
        """Returns the key of a batch. Of its view only the running tokens change, so that most keys are known."""
        running_tokens, turn = self._turns.get(batch, (None, ()))
        if running_tokens != batch.running_tokens:
            turn = (*self._fairness.key(batch.view()), batch.arrival)
            self._turns[batch] = batch.running_tokens, turn
        return turn

    def next_up(self, home: str | None, count: int) -> list[Sample]:
        """Returns the first `count` samples bound to `home` in the order of the next decision, regardless of their
        need.
        """
        found = []
        for queues in self._in_turn(home):
            while len(found) < count and (sample := self._peek(queues, MAX_NEED_TOKENS)) is not None:
                found.append(sample)
                if len(found) < count:
                    self.drop(sample)
        for sample in found:
            if sample.sample_id not in self._samples:
                self._push(sample, sample.view())
        return found

    def last_first(self, samples: Iterable[Sample]) -> list[Sample]:
        """Returns waiting samples in the reverse of the order of their batches and of lane 0, queued here or not."""
        return sorted(samples, key=self._whole_key, reverse=True)

    def _whole_key(self, sample: Sample) -> tuple:
        key = self._keys(sample.view(), sample.group.view())[0]
        return (self._turn(sample.group.batch), key) if self._apart else ((), key)

    def _peek(self, queues: list[FitQueue], room_tokens: int) -> Sample | None:
        lane = self._ordering.lane(self._picks)
        while (sample_id := queues[lane].peek(room_tokens)) is not None:
            sample = self._samples[sample_id]
            if lane in self._growing:
                key = self._keys(sample.view(), sample.group.view())[lane]
                if key != queues[lane].key(sample_id):
                    queues[lane].push(sample_id, sample.need_tokens, key)
                    continue
            return sample
        return None

    def _keys(self, sample: SampleView, group: GroupView) -> list[tuple]:
        if self.is_oracle:
            keys = self._ordering.keys_of_length(sample, self._lengths)
        else:
            keys = self._ordering.keys(sample, group)
        return [(*key, sample.arrival, sample.index) for key in keys]
