"""Which sample's KV lies in the pool, under which version, and when nobody needs it any more.

Invariant: a sample in the book has had KV stored that has been neither released nor lost since, under the version
that it continues with; what leaves the book is released exactly once. Called by `RolloutCore`; it returns actions.
"""

from collections.abc import Iterable

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Chunk, Group, Sample, State
from tailrace.policies.core.wait_queue import WaitQueue
from tailrace.policies.families.kv_on_update import KvOnUpdate
from tailrace.policies.protocol.actions import ReleaseCause, ReleaseKv
from tailrace.policies.protocol.events import PoolReported

FULL_SHARE = 0.9
"""Where Mooncake would begin to evict by itself, least lately used first: it does not know what is needed next."""

ROOMY_SHARE = 0.8
"""A tenth of the pool at once, so that room is made seldom: each time sorts what waits."""


class KvTracker:
    """`policy` says which version a sample continues with; `table` which weights are current."""

    def __init__(self, policy: KvOnUpdate, table: ReplicaTable):
        self._policy, self._table = policy, table
        self._held: dict[str, Sample] = {}
        self._groups: dict[str, None] = {}  # of which something was ever stored: their prompts' KV
        self._report: PoolReported | None = None  # the newest; None once it has been acted upon
        self._reported_at = self._made_room_at = float("-inf")

    def version(self, sample: Sample) -> int:
        """The version under which the sample's KV is read and written now."""
        present = self._table.weights_version
        first = sample.first_version
        return self._policy.kv_version(present if first is None else first, present)

    def keeps(self, chunk: Chunk) -> bool:
        """Whether its sample continues with the KV of a running chunk, which will have made a token when it stops."""
        first = chunk.sample.first_version
        first = chunk.weights_version if first is None else first
        return self._policy.kv_version(first, self._table.weights_version) == chunk.kv_version

    # ---- what the pool holds -----------------------------------------------------------------------

    def store(self, chunk: Chunk, stored_tokens: int) -> None:
        """A chunk has ended: so much of its sample's context the pool holds, under the chunk's version."""
        sample = chunk.sample
        sample.stored_tokens = stored_tokens
        if stored_tokens:
            sample.stored_version = chunk.kv_version
            self._held[sample.sample_id] = sample
            self._groups[sample.group.spec.group_id] = None

    def lose(self, sample_ids: Iterable[str] | None) -> None:
        """The pool has lost the KV of these samples, or everything: there is nothing of it left to release."""
        if sample_ids is None:
            sample_ids, self._groups = list(self._held), {}
        for sample_id in sample_ids:
            if (sample := self._held.pop(sample_id, None)) is not None:
                sample.stored_tokens = 0

    # ---- what it need not hold any more --------------------------------------------------------------

    def end(self, sample: Sample) -> tuple[ReleaseKv, ...]:
        """The sample has ended: nobody continues with its KV."""
        return self._release(sample, ReleaseCause.ENDED, "the sample has ended")

    def _release(self, sample: Sample, cause: ReleaseCause, reason: str) -> tuple[ReleaseKv, ...]:
        if self._held.pop(sample.sample_id, None) is None:
            return ()
        sample.stored_tokens = 0
        return (ReleaseKv(sample.group.spec.group_id, sample.sample_id, cause, reason),)

    def release_prompt(self, group: Group) -> tuple[ReleaseKv, ...]:
        """The group has ended: nobody reads its prompt again."""
        group_id = group.spec.group_id
        if group_id not in self._groups:
            return ()
        del self._groups[group_id]
        return (ReleaseKv(group_id, None, ReleaseCause.ENDED, "all samples have ended"),)

    def release_stale(self, sample: Sample) -> tuple[ReleaseKv, ...]:
        """Give up KV of another version than the sample continues with."""
        if sample.sample_id not in self._held or sample.stored_version == (version := self.version(sample)):
            return ()
        reason = f"its KV is of weights {sample.stored_version}; it goes on under {version}"
        return self._release(sample, ReleaseCause.STALE, reason)

    def release_all_stale(self) -> list[ReleaseKv]:
        """The weights have changed."""
        return [action for sample in list(self._held.values()) for action in self.release_stale(sample)]

    # ---- how full it is ------------------------------------------------------------------------------

    def report(self, event: PoolReported) -> None:
        """Note how full the pool is; a report that comes late changes nothing (law 8)."""
        if event.observed_at >= self._reported_at:
            self._report, self._reported_at = event, event.observed_at

    def make_room(self, now: float, waiting: WaitQueue) -> list[ReleaseKv]:
        """If the pool is full by its newest report, give up the KV of waiting samples, needed last first, until it is
        roomy by these books. A report from before room was made last still counts what was given up then."""
        if self._report is None:
            return []
        report, self._report = self._report, None
        if report.observed_at <= self._made_room_at:
            return []
        if report.used_tokens <= FULL_SHARE * report.capacity_tokens:
            return []
        left, actions = report.used_tokens - ROOMY_SHARE * report.capacity_tokens, []
        for sample in waiting.last_first(s for s in self._held.values() if s.state is State.WAITING):
            if left <= 0:
                break
            own_tokens = sample.stored_tokens - sample.group.spec.prompt_tokens
            if own_tokens > 0:  # the prompt's KV is its group's
                left -= own_tokens
                actions += self._release(sample, ReleaseCause.FULL, "the pool is full: needed last")
        if actions:
            self._made_room_at = now
        return actions
