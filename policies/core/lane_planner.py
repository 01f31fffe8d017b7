"""Lanes of the batch in flight: plans by the `lanes` policy, and the home of each sample that they give.

A waiting sample is queued again at its new home. A running one goes there at its chunk's end, or at once if the plan
gains more than the move takes. A plan is renewed after a share of its seconds, and when a replica is idle, comes or
goes. Lanes are for one batch in flight, whose groups came all at once, of samples that neither ordering nor placement
binds; if others are in flight too (`_alone`), samples are free. Invariant: a sample with a home fits there on an empty
replica. Called by `RolloutCore` alone.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from tailrace.policies.core.fit_queue import STEP_TOKENS
from tailrace.policies.core.length_tracker import LengthTracker
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Batch, Group, RequestBuffer, Sample
from tailrace.policies.core.running_chunks import RunningChunks
from tailrace.policies.core.sample_states import RUNNING, WAITING
from tailrace.policies.core.scaling import left_s, move_s
from tailrace.policies.core.wait_queue import WaitQueue
from tailrace.policies.families.lanes import LanePlan
from tailrace.policies.families.registry import Policies, name_of
from tailrace.policies.models.length_belief import LengthLaw, Remainders, ranked
from tailrace.policies.protocol.events import IllegalEvent
from tailrace.policies.protocol.views import BeliefView, LaneReplica, LanesView

LOOK_S = 0.25
"""Seconds between two looks for an idle replica, or between two plans: a look reads the books of every replica."""

ONLY_S = 10.0
"""Seconds for which a single replica has to be ready before it gets the lanes of all others. These may load new weights
until then; one that cannot load them holds none up.
"""

DRAWS = 2
"""Draws of remainders by which the gain of lanes is estimated, once for a batch."""


class LanePlanner:
    """Writes `Sample.home` of the batch that has lanes. `end_s`: when its last lane is expected to end."""

    def __init__(
        self, policies: Policies, table: ReplicaTable, waiting: WaitQueue, running: RunningChunks,
        buffer: RequestBuffer, lengths: LengthTracker,
    ):  # fmt: skip
        self._policy, self._table, self._waiting, self._running = policies.lanes, table, waiting, running
        self._buffer, self._lengths = buffer, lengths
        self._max_drafts = policies.drafting.max_draft_tokens
        self._binds = policies.placement.sticky
        self._truth: dict[str, int] = {}
        self._batch: Batch | None = None  # looked at last
        self._law: LengthLaw | None = None
        self._groups = -1  # of the batch when a law was looked for last
        self._levels: dict[Group, tuple[float, float]] = {}
        self._planned: bool | None = None  # whether the batch has lanes; None before its first plan
        self._ready: list[str] = []  # replicas that were ready at the last look
        self._due_s = self._looked_s = self._changed_s = float("-inf")  # the last: when these have changed
        self._looked = False  # whether idle replicas are to be looked for in this decision
        self.end_s = 0.0

    # ---- true lengths --------------------------------------------------------------------------------

    def reveal(self, lengths: Mapping[str, int]) -> bool:
        """Takes true lengths if the policy needs them. Returns whether it does."""
        if self._policy.sees_truth:
            self._truth.update(lengths)
        return self._policy.sees_truth

    def check_new(self, sample_ids: Iterable[str]) -> None:
        """Checks new samples. Raises IllegalEvent if the policy needs true lengths and has none of one of them."""
        for sample_id in sample_ids if self._policy.sees_truth else ():
            if sample_id not in self._truth:
                raise IllegalEvent(f"{sample_id}: lanes {name_of(self._policy)} needs true lengths, has none")

    def forget(self, group: Group) -> None:
        """Drops what is known of a group that has been emitted."""
        self._levels.pop(group, None)
        for sample in group.samples if self._truth else ():
            self._truth.pop(sample.sample_id, None)

    def forget_batch(self, batch: Batch) -> None:
        if self._batch is batch:
            self._batch, self._law, self._planned, self._levels = None, None, None, {}

    # ---- plans ----------------------------------------------------------------------------------------

    def is_lane(self, sample: Sample) -> bool:
        """Returns whether a sample's home is a lane."""
        return bool(self._planned) and sample.home is not None and sample.group.batch is self._batch

    def fits(self, sample: Sample, replica_id: str) -> bool:
        """Returns whether an empty replica has room for a sample's next chunk, rounded up as queues do."""
        return -(-sample.need_tokens // STEP_TOKENS) * STEP_TOKENS <= self._table.whole_tokens(replica_id)

    def renew(self, now: float) -> list[Sample]:
        """Plans if a plan is due. Returns the waiting samples whose home has changed, in order of arrival."""
        if not self._policy.on or self._binds or not self._buffer.batches:
            return []
        if not self._alone():
            return self._free()
        if now < self._looked_s + LOOK_S and self._batch is not None:
            return []
        self._looked_s, self._looked = now, True
        batch = next(iter(self._buffer.batches.values()))
        if batch is not self._batch:
            self._begin(batch)
        ready = self._table.ready()
        if now < self._due_s and ready == self._ready and not (self._planned and self._is_idle(ready)):
            return []
        self._changed_s = now if ready != self._ready else self._changed_s
        self._ready, self._due_s = ready, now + LOOK_S
        if self._law is None and batch.positions != self._groups and not self._policy.sees_truth:
            self._groups = batch.positions
            self._law = self._lengths.law(batch, self._policy.belief.min_answers)
        knows = (self._policy.sees_truth or self._law is not None) and self._planned is not False
        is_only = len(ready) == 1 and self._planned and now >= self._changed_s + ONLY_S
        return self._plan(now, batch, ready) if knows and (len(ready) > 1 or is_only) else []

    def _alone(self) -> bool:
        """Returns whether one batch is in flight: lanes of two would compete for replicas by no rule of fairness;
        whether its groups came all at once, since later ones are not in a plan; and whether all replicas are for it.
        """
        batches = self._buffer.batches
        return len(batches) == 1 and not self._table.kept and not next(iter(batches.values())).forgets

    def _begin(self, batch: Batch) -> None:
        self._batch, self._planned, self._levels = batch, None, {}
        self._law, self._groups = None, -1
        self._due_s = float("-inf")

    def _is_idle(self, ready: list[str]) -> bool:
        return any(not self._table.running(replica_id) for replica_id in ready)

    def _free(self) -> list[Sample]:
        """Drops all lanes. Returns the waiting samples that had one."""
        if not self._planned:
            self._batch = None
            return []
        batch, self._batch, self._planned = self._batch, None, None
        had = [s for g in batch.groups.values() for s in g.samples if s.home is not None and g.home is None]
        for sample in had:
            sample.home = None
        return [sample for sample in had if sample.state is WAITING]

    def _plan(self, now: float, batch: Batch, ready: list[str]) -> list[Sample]:
        groups = [group for group in batch.groups.values() if group.unended]
        if any(group.home is not None for group in groups):
            return []
        alive = [[s for s in group.samples if s.state is RUNNING or s.state is WAITING] for group in groups]
        samples = list(chain.from_iterable(alive))
        if not samples or not self._is_measured(ready):
            return []
        of_group = np.repeat(np.arange(len(groups)), [len(some) for some in alive])
        streamed = np.array([s.streamed_tokens if s.state is RUNNING else 0 for s in samples])
        made = np.array([s.generated_tokens for s in samples]) + streamed
        prompts = np.array([group.spec.prompt_tokens for group in groups])
        context = prompts[of_group] + np.array([s.outside_tokens for s in samples]) + made
        view = self._view(now, samples, context, self._left(groups, samples, of_group, made), ready)
        plan = self._policy.plan(view)
        self._due_s = now + max(LOOK_S, self._policy.every * plan.end_s)
        self.end_s = now + plan.end_s
        if self._planned is None:
            self._planned = plan.gain >= self._policy.min_gain
        if not self._planned:
            return []
        return self._apply(samples, plan, ready)

    def _is_measured(self, ready: list[str]) -> bool:
        return any(self._table.performance(replica_id) is not None for replica_id in ready)

    def _apply(self, samples: list[Sample], plan: LanePlan, ready: list[str]) -> list[Sample]:
        """Gives samples their homes. Returns the waiting ones whose home has changed."""
        gain_s = plan.stay_s - plan.end_s
        again = []
        for sample, place in zip(samples, plan.replica.tolist(), strict=True):
            home = ready[place]
            if sample.home == home and sample.last_replica == home:
                continue
            if sample.state is RUNNING:
                sample.home = home
                if sample.last_replica != home and gain_s > 0.0:
                    self._move(sample, gain_s)
            elif sample.home != home:
                before, sample.home = sample.home, home if self.fits(sample, home) else None
                if sample.home != before:
                    again.append(sample)
        return again

    def fill_idle(self) -> list[Sample]:
        """Gives each replica on which nothing runs a sample that waits for room on another, once all that can start
        have. Returns those. Its lane may be of samples that still run elsewhere.
        """
        looked, self._looked = self._looked, False
        if not (looked and self._planned and len(self._waiting)):
            return []
        idle = [replica_id for replica_id in self._table.ready() if not self._table.running(replica_id)]
        waiting = [sample for sample in self._waiting.samples() if self.is_lane(sample)] if idle else []
        moved = []
        for replica_id in idle:
            found = next((sample for sample in waiting if self.fits(sample, replica_id)), None)
            if found is not None:
                waiting.remove(found)
                found.home = replica_id
                moved.append(found)
        return moved

    def _move(self, sample: Sample, gain_s: float) -> None:
        """Stops a running sample's chunk if the plan gains more than its move takes, and it would not end before. A
        race goes on where it is.
        """
        chunk = self._running.chunks.get(f"{sample.sample_id}:{sample.chunks - 1}")
        performance = self._table.performance(sample.last_replica) if chunk is not None else None
        if performance is None or chunk.aborting or chunk.copies or chunk.beaten or sample.cancelled:
            return
        takes_s = move_s(chunk, performance)
        if gain_s > takes_s and left_s(chunk, performance, self._table.running(chunk.replica_id)) > takes_s:
            self._running.abort(chunk, f"its lane is on {sample.home}: it moves now")

    # ---- views ----------------------------------------------------------------------------------------

    def _view(
        self, now: float, samples: list[Sample], context: np.ndarray, left: Remainders, ready: list[str]
    ) -> LanesView:
        """Returns the view of samples with contexts of `context` tokens, int64[n], as last seen. A sample's replica is
        where its KV is: it runs there, or is to run there, or ran there last.
        """
        place = {replica_id: number for number, replica_id in enumerate(ready)}
        chunks = self._running.chunks.values()
        table = self._table
        return LanesView(
            now=now,
            left=left.mean,
            left_high=left.high,
            drawn=left.drawn,
            context=context,
            replica=np.array(
                [place.get(s.last_replica if s.state is RUNNING else s.home or s.last_replica, -1) for s in samples]
            ),
            replicas=tuple(
                LaneReplica(table.whole_tokens(i), table.max_running(i), table.performance(i)) for i in ready
            ),
            chance=table.mean_chance(),
            max_drafts=self._max_drafts,
            told=1.0 if self._policy.sees_truth or self._planned else self._told(samples),
            reserved_tokens=sum([chunk.max_tokens for chunk in chunks]) / len(chunks) / 2 if chunks else 0.0,
        )

    def _left(self, groups: list[Group], samples: list[Sample], of_group: np.ndarray, made: np.ndarray) -> Remainders:
        """Returns what is believed of the samples' remainders, or known. `of_group`, `made`, int64[n]: index of each
        sample's group, and its tokens so far.
        """
        if self._policy.sees_truth:
            truth = np.maximum(np.array([self._truth[sample.sample_id] for sample in samples]) - made, 1.0)
            return Remainders(truth, truth, truth[None])
        self._believe(groups)
        finished = [group.finished_lengths for group in groups]
        levels = np.array([self._levels[group] for group in groups])
        view = BeliefView(
            level_mean=levels[:, 0],
            level_variance=levels[:, 1],
            finished=np.array(list(chain.from_iterable(finished)), np.int64),
            finished_group=np.repeat(np.arange(len(groups)), [len(some) for some in finished]),
            group=of_group,
            made=made,
            max_tokens=np.array([sample.max_tokens for sample in samples]),
        )
        return self._policy.belief.left(self._law, view, DRAWS if self._planned is None else 0)

    def _told(self, samples: list[Sample]) -> float:
        """Returns the share of the variance of lengths that is known: what a prompt's level explains, as far as history
        and predictions tell it, or mates are going to.
        """
        sizes = {sample.group: len(sample.group.samples) for sample in samples}
        mates = 1.0 - len(sizes) / sum(sizes.values())
        variance = sum(self._levels[group][1] for group in sizes) / len(sizes)
        return (1.0 - self._law.within) * max(mates, 1.0 - variance)

    def _believe(self, groups: list[Group]) -> None:
        """Adds the levels of new groups, by their history and predictions."""
        new = [group for group in groups if group not in self._levels]
        known = [group for group in new if group.spec.prediction is not None]
        scores = dict(zip(known, ranked([group.spec.prediction.number for group in known]), strict=True))
        for group in new:
            level = self._law.level(group.spec.past_lengths)
            if group in scores:
                level = self._law.predicted(level, float(scores[group]), group.spec.prediction.quality)
            self._levels[group] = level
