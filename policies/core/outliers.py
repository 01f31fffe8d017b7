"""Outliers of the batches in flight: samples far longer than their ranking group's history (RhymeRL 6.3).

Once few samples of a ranking group are left, those past its limit move: from a short group to a replica that is at work
on a longer one, from a long group to a replica of the next batch's longest one, if that batch is in flight. None move
while replicas keep older weights. Invariant: a sample moves for this once at most, and keeps its tokens. Called by
`RolloutCore` and `UnassignedGroups`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Batch, Group, Sample
from tailrace.policies.core.running_chunks import RunningChunks
from tailrace.policies.core.sample_states import RUNNING, WAITING
from tailrace.policies.families.ordering import Ordering
from tailrace.policies.protocol.views import PromptView, ReplicaView

LOOK_S = 0.25
"""Seconds between two looks, as of lanes: one reads the counts of all groups."""


class RankedGroups(NamedTuple):
    """A ranking group of a batch. `limit_tokens`: longer samples are outliers; None: nothing is known of lengths."""

    groups: tuple[Group, ...]
    replicas: tuple[str, ...]
    limit_tokens: float | None


class Outliers:
    """`moved`: samples that have moved, each with `within` or `next`, until their group has been emitted."""

    def __init__(self, ordering: Ordering, table: ReplicaTable, running: RunningChunks):
        self._policy, self._table, self._running = ordering, table, running
        self.on = getattr(ordering, "migrate", False)
        self._ranking: dict[Batch, tuple[RankedGroups, ...]] = {}
        self._looked_s = float("-inf")
        self.moved: dict[Sample, str] = {}
        self._homes: dict[Sample, str] = {}  # of these, until the replica leaves
        self.moves = {"within": 0, "next": 0}

    def rank(
        self, batch: Batch, groups: Sequence[Group], prompts: Sequence[PromptView], replicas: Sequence[ReplicaView]
    ) -> None:
        """Records the ranking groups of a batch as its first groups, which have these prompts, are bound."""
        if self.on and batch not in self._ranking:
            ranking = self._policy.ranking(prompts, batch.step, replicas)
            self._ranking[batch] = tuple(
                RankedGroups(tuple(groups[place] for place in one.places), one.replicas, one.limit_tokens)
                for one in ranking
            )

    def forget(self, group: Group) -> None:
        """Drops what is known of a group that is about to be emitted, and of its batch if it is the last one."""
        for sample in group.samples if self.moved else ():
            self.moved.pop(sample, None)
            self._homes.pop(sample, None)
        if group.batch.unemitted == 1:
            self._ranking.pop(group.batch, None)

    def home(self, sample: Sample) -> str | None:
        """Returns the replica to which a sample has moved; None if it has not, or once that replica has left."""
        if sample in self._homes and not self._table.stays(self._homes[sample]):
            del self._homes[sample]
        return self._homes.get(sample)

    def look(self, now: float) -> list[Sample]:
        """Moves outliers: running ones stop first. Returns the waiting ones, to be queued again."""
        if not self._ranking or now < self._looked_s + LOOK_S or self._table.kept:
            return []
        self._looked_s, again = now, []
        for batch, ranking in self._ranking.items():
            for rank, one in enumerate(ranking):
                unfinished = sum(group.unended for group in one.groups)
                if not unfinished or one.limit_tokens is None:
                    continue
                samples = sum(len(group.samples) for group in one.groups)
                where = self._policy.migration(rank, len(ranking), unfinished, samples)
                for sample in self._past(one) if where != "stay" else ():
                    if self._move(sample, where, self._open_to(batch, rank, where)) and sample.state is WAITING:
                        again.append(sample)
        return again

    def _past(self, ranked: RankedGroups) -> Iterable[Sample]:
        """Returns the samples past their limit, as last seen, that have not moved."""
        for group in ranked.groups:
            for sample in group.samples if group.unended else ():
                tokens = sample.generated_tokens + (sample.streamed_tokens if sample.state is RUNNING else 0)
                if sample.state in (RUNNING, WAITING) and tokens > ranked.limit_tokens and sample not in self.moved:
                    yield sample

    def _open_to(self, batch: Batch, rank: int, where: str) -> Sequence[str]:
        """Returns the replicas of longer ranking groups that are at work on this batch, or those of the longest one of
        the next batch in flight.
        """
        if where == "within":
            later = dict.fromkeys(name for one in self._ranking[batch][rank + 1 :] for name in one.replicas)
            return [name for name in later if name in self._table and self._works_on(name, batch)]
        after = [other for other, ranking in self._ranking.items() if other.step > batch.step and ranking]
        return self._ranking[min(after, key=lambda other: other.step)][-1].replicas if after else ()

    def _works_on(self, replica_id: str, batch: Batch) -> bool:
        chunks = self._running.chunks
        return any(chunks[chunk_id].sample.group.batch is batch for chunk_id in self._table.chunks(replica_id))

    def _move(self, sample: Sample, where: str, replicas: Sequence[str]) -> bool:
        """Gives a sample the least busy of these replicas that is as large as its own. Returns whether there is one."""
        chunk = self._running.chunks.get(f"{sample.sample_id}:{sample.chunks - 1}") if sample.state is RUNNING else None
        before = sample.home
        if before not in self._table or (sample.state is RUNNING and (chunk is None or chunk.aborting or chunk.copies)):
            return False
        least = self._table.whole_tokens(before)
        fit = [
            name for name in replicas
            if name != before and self._table.stays(name) and self._table.whole_tokens(name) >= least
        ]  # fmt: skip
        if not fit:
            return False
        sample.home = self._homes[sample] = min(fit, key=lambda name: (self._table.running(name), name))
        self.moved[sample] = where
        self.moves[where] += 1
        if chunk is not None:
            self._running.abort(chunk, f"an outlier of its ranking group: it continues on {sample.home}")
        return True
