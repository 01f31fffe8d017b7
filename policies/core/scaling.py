"""Number of replicas over time, by the tail policy. No work is lost or repeated when it changes.

The replicas that Serve would stop first close: they take no new chunks, and their waiting samples are bound again.
Their running samples move at the end of the chunk, or at once if that is sooner by the measured speeds. Invariant:
fewer replicas are requested only once those to stop are idle. Called by `RolloutCore` once per decision.
"""

from math import inf
from typing import NamedTuple

from tailrace.policies.core.draft_planner import DraftPlanner
from tailrace.policies.core.races import Races
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Chunk, RequestBuffer
from tailrace.policies.core.running_chunks import RunningChunks
from tailrace.policies.core.validation import checked_count
from tailrace.policies.families.tail import ReplicaGoal, Tail, roomy
from tailrace.policies.protocol.actions import Action, SetReplicas
from tailrace.policies.protocol.performance import Performance
from tailrace.policies.protocol.views import TailView

LOOK_S = 0.25
"""Seconds between two looks, unless batches have come or gone: a look reads the books of every replica."""


class Limits(NamedTuple):
    """Minimum and maximum number of engine replicas."""

    min: int
    max: int


class Scaling:
    """Holds the number of requested replicas. `limits`: None if the number is not decided here."""

    def __init__(
        self, policy: Tail, limits: Limits | None, table: ReplicaTable, running: RunningChunks, buffer: RequestBuffer,
        races: Races, draft_planner: DraftPlanner,
    ):  # fmt: skip
        self._policy, self._limits, self._table = policy, limits, table
        self._running, self._buffer, self._races, self._draft_planner = running, buffer, races, draft_planner
        self._memory = None  # memory of the policy
        self._asked: ReplicaGoal | None = None
        self._reserved = 0
        self._looked_at = float("inf")  # before the first batch, the initial number stays

    def reopen(self) -> None:
        """Reopens all replicas for a new batch: none leaves before the policy has considered it."""
        self._reserved = 0
        self._table.close(())
        self._looked_at = float("-inf")

    def reserve(self, replicas: int) -> None:
        self._reserved, self._looked_at = replicas, float("-inf")

    def decide(self, now: float) -> tuple[list[str], list[Action]]:
        """Returns the replicas closed now, and the actions due."""
        if self._limits is None or now < self._looked_at + LOOK_S:
            return [], []
        self._looked_at = now
        order = self._table.stop_order()
        view = self._view(now, order)
        wanted, self._memory = self._policy.wanted(view, self._memory)
        checked_count(self._policy, "wanted.engines", wanted.engines, 0, view.max_replicas)
        checked_count(self._policy, "wanted.drafters", wanted.drafters, 0, view.max_replicas)
        closed = self._table.close(order[: max(0, len(order) - wanted.engines)])
        for replica_id in closed:
            empty(replica_id, self._table, self._running, "is to be given back")
        return closed, self._ask(order, wanted, view)

    def _view(self, now: float, order: list[str]) -> TailView:
        running, unended = len(self._running), self._buffer.unended
        submitted = sum(batch.samples for batch in self._buffer.batches.values())
        views = tuple(self._table.view(replica_id) for replica_id in reversed(order))
        most = self._limits.max
        least = max(self._limits.min, min(self._reserved, most))
        races = self._races.outlook(most)
        roles = self._draft_planner.outlook(running, max(least, roomy(views, running, most)), most) if running else ()
        counts = running == unended and getattr(self._policy, "counts_moves", False)
        left_tokens, move_s = self._rest() if counts else (0, 0.0)
        return TailView(
            now=now,
            waiting=unended - running,
            running=running,
            unended=unended,
            submitted=submitted,
            replicas=views,
            min_replicas=least,
            max_replicas=most,
            races=races,
            roles=roles,
            left_tokens=left_tokens,
            move_s=move_s,
        )

    def _rest(self) -> tuple[int, float]:
        """Returns the expected tokens left of the longest running sample, and the mean seconds of a move.
        O(running).
        """
        left, moves = 0, []
        for chunk in self._running.chunks.values():
            if chunk.copy_of is None:
                left = max(left, left_tokens(chunk))
                performance = self._table.performance(chunk.replica_id)
                moves.append(move_s(chunk, performance) if performance is not None else inf)
        known = [one for one in moves if one < inf]
        return left, sum(known) / len(known) if known else 0.0

    def _ask(self, order: list[str], wanted: ReplicaGoal, view: TailView) -> list[Action]:
        """Requests the wanted replicas. Serve stops the first ones of `order`, as far as they are idle and not wanted.

        Draft models take places without an engine, until the batch has ended.
        """
        free = 0
        while free < len(order) - wanted.engines and not self._table.running(order[free]):
            free += 1
        engines = wanted.engines if wanted.engines >= len(order) else len(order) - free
        asked = ReplicaGoal(engines, min(wanted.drafters, view.max_replicas - engines) if view.unended else 0)
        if asked == self._asked:
            return []
        self._asked = asked
        self._draft_planner.expect_drafters(asked.drafters)
        reason = f"{view.waiting} samples wait, {view.running} run on {len(order)} replicas"
        return [SetReplicas(engines, reason, asked.drafters)]


def empty(replica_id: str, table: ReplicaTable, running: RunningChunks, why: str) -> None:
    """Ends the races on a replica, and the chunks that move sooner than they would end by themselves. `why`: in some
    words after its name.
    """
    performance = table.performance(replica_id)
    chunks = [running.chunks[chunk_id] for chunk_id in table.chunks(replica_id)]
    for chunk in chunks:
        if chunk.copy_of is not None:
            running.abort(chunk, f"{replica_id} {why}: its race ends")
        elif performance is not None and left_s(chunk, performance, len(chunks)) > move_s(chunk, performance):
            running.abort(chunk, f"{replica_id} {why}: it moves now")


def left_tokens(chunk: Chunk) -> int:
    """Returns the expected tokens left of a chunk's sample. A sample beyond its expectation counts as half done."""
    sample = chunk.sample
    made = sample.generated_tokens + sample.streamed_tokens
    left = sample.expected_tokens - made
    return left if left > 0 else max(1, min(made, sample.max_tokens - made))


def left_s(chunk: Chunk, performance: Performance, running: int) -> float:
    """Returns the seconds until the expected end of a chunk among `running`: by its own limit, or by its sample's
    expected end. A step may make several of its tokens.
    """
    sample = chunk.sample
    expected = sample.expected_tokens - sample.generated_tokens
    tokens = min(chunk.max_tokens, max(1, expected)) - sample.streamed_tokens
    return max(1, tokens) * performance.token_s(running)


def move_s(chunk: Chunk, performance: Performance) -> float:
    """Returns the seconds to move a chunk: to fetch the KV of its whole context or to compute it; infinite while
    neither was measured.
    """
    return performance.move_s(chunk.sample.context_tokens + chunk.sample.streamed_tokens) or inf
