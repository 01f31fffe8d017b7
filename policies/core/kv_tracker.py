"""KV of samples in the pool: its owner, its version, and its release once no sample needs it any more.

Invariant: a sample in the book has stored KV, neither released nor lost since, under the version that it continues
with. KV that leaves the book is released exactly once. Called by `RolloutCore`; returns actions.
"""

from collections.abc import Callable, Iterable

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Chunk, Group, Sample
from tailrace.policies.core.sample_states import HELD, WAITING
from tailrace.policies.core.validation import checked_count
from tailrace.policies.core.wait_queue import WaitQueue
from tailrace.policies.families.kv_on_update import KvOnUpdate
from tailrace.policies.protocol.actions import ReleaseCause, ReleaseKv
from tailrace.policies.protocol.events import PoolReported

FULL_SHARE = 0.9
"""Share of the pool at which Mooncake starts to evict, least recently used first. Mooncake does not know the next
need.
"""

ROOMY_SHARE = 0.8
"""Target share after making room: a tenth of the pool at once, since each time sorts the waiting samples."""


class KvTracker:
    """`policy` decides the version that a sample continues with; `table` holds the current weights version."""

    def __init__(self, policy: KvOnUpdate, table: ReplicaTable):
        self._policy, self._table = policy, table
        self._held: dict[str, Sample] = {}
        self._groups: dict[str, None] = {}  # groups that have stored KV: their prompts' KV
        self._report: PoolReported | None = None  # the newest; None once it has been acted upon
        self.capacity_tokens = 0  # of the pool, by the newest report
        self._reported_at = self._made_room_at = float("-inf")

    def version(self, sample: Sample, present: int | None = None) -> int:
        """Returns the version under which the sample's KV is read and written now. `present`: version of the replica
        that it starts on, or None while that is not known.
        """
        first = sample.first_version
        present = self._table.continued(first) if present is None else present
        version = self._policy.kv_version(present if first is None else first, present)
        return checked_count(self._policy, "kv_version", version, 0, present)

    def keeps(self, chunk: Chunk) -> bool:
        """Returns whether the sample continues with the KV of its running chunk. A stopped chunk has made a token."""
        first = chunk.sample.first_version
        first = chunk.weights_version if first is None else first
        return self._policy.kv_version(first, self._table.continued(first)) == chunk.kv_version

    # ---- KV in the pool ----------------------------------------------------------------------------

    def store(self, chunk: Chunk, stored_tokens: int) -> None:
        """Records at a chunk's end the tokens of its context in the pool, under the chunk's version."""
        sample = chunk.sample
        sample.stored_tokens = stored_tokens
        if stored_tokens:
            sample.stored_version = chunk.kv_version
            self._held[sample.sample_id] = sample
            self._groups[sample.group.spec.group_id] = None

    def lose(self, sample_ids: Iterable[str] | None) -> None:
        """Forgets KV that the pool has lost, of these samples, or of all if None. It needs no release."""
        if sample_ids is None:
            sample_ids, self._groups = list(self._held), {}
        for sample_id in sample_ids:
            if (sample := self._held.pop(sample_id, None)) is not None:
                sample.stored_tokens = 0

    # ---- KV to release -------------------------------------------------------------------------------

    def end(self, sample: Sample) -> tuple[ReleaseKv, ...]:
        """Releases the KV of an ended sample."""
        return self._release(sample, ReleaseCause.ENDED, "the sample has ended")

    def _release(self, sample: Sample, cause: ReleaseCause, reason: str) -> tuple[ReleaseKv, ...]:
        if self._held.pop(sample.sample_id, None) is None:
            return ()
        sample.stored_tokens = 0
        return (ReleaseKv(sample.group.spec.group_id, sample.sample_id, cause, reason),)

    def release_prompt(
        self, group: Group, cause: ReleaseCause = ReleaseCause.ENDED, reason: str = "all samples have ended"
    ) -> tuple[ReleaseKv, ...]:
        """Releases the KV of a group's prompt, which no sample needs now."""
        group_id = group.spec.group_id
        if group_id not in self._groups:
            return ()
        del self._groups[group_id]
        return (ReleaseKv(group_id, None, cause, reason),)

    def release_stale(self, sample: Sample) -> tuple[ReleaseKv, ...]:
        """Releases KV of another version than the one that the sample continues with."""
        if sample.sample_id not in self._held or sample.stored_version == (version := self.version(sample)):
            return ()
        reason = f"its KV is of weights {sample.stored_version}; it goes on under {version}"
        return self._release(sample, ReleaseCause.STALE, reason)

    def release_all_stale(self) -> list[ReleaseKv]:
        """Releases all stale KV after a change of weights."""
        return [action for sample in list(self._held.values()) for action in self.release_stale(sample)]

    def suspend(self, sample: Sample, reason: str) -> tuple[ReleaseKv, ...]:
        """Releases the KV of a suspended trajectory, and that of its prompt if no mate needs it."""
        own = self._release(sample, ReleaseCause.SUSPENDED, reason)
        is_alone = sample.group.unended == 1
        return own + (self.release_prompt(sample.group, ReleaseCause.SUSPENDED, reason) if is_alone else ())

    # ---- use of the pool -----------------------------------------------------------------------------

    def report(self, event: PoolReported) -> None:
        """Records the use of the pool. A late report changes nothing (law 8)."""
        if event.observed_at >= self._reported_at:
            self._report, self._reported_at = event, event.observed_at
            self.capacity_tokens = event.capacity_tokens

    def make_room(self, now: float, waiting: WaitQueue, is_spare: Callable[[Sample], bool]) -> list[ReleaseKv]:
        """Releases KV of waiting and held samples if the pool is full by its newest report, until it is roomy by these
        books.

        Held samples count as if they waited already. KV that is needed last is released first, that of spare samples
        before. A report from before the last release is ignored: it still counts the KV released then.
        """
        if self._report is None:
            return []
        report, self._report = self._report, None
        if report.observed_at <= self._made_room_at:
            return []
        if report.used_tokens <= FULL_SHARE * report.capacity_tokens:
            return []
        left, actions = report.used_tokens - ROOMY_SHARE * report.capacity_tokens, []
        last_first = waiting.last_first(s for s in self._held.values() if s.state in (WAITING, HELD))
        for sample in sorted(last_first, key=is_spare, reverse=True):
            if left <= 0:
                break
            own_tokens = sample.stored_tokens - sample.group.spec.prompt_tokens
            if own_tokens > 0:  # the prompt's KV is its group's
                left -= own_tokens
                actions += self._release(sample, ReleaseCause.FULL, "the pool is full: needed last")
        if actions:
            self._made_room_at = now
        return actions
