"""Finished lengths of each group and batch, and the estimates that the `lengths` policy derives from them.

Invariant: a waiting sample's `expected_tokens` is the policy's answer as of its last chunk or its last finished mate,
whichever came later. A batch's summary is renewed as the evidence doubles, so it costs little for any number of
samples. Called by `RolloutCore` alone.
"""

from collections import deque
from collections.abc import Iterable

from tailrace.policies.core.request_buffer import KNOWN_PROMPTS, Batch, Group, RequestBuffer, Sample
from tailrace.policies.core.sample_states import ENDED, WAITING
from tailrace.policies.core.validation import checked_count
from tailrace.policies.families.lengths import class_starts
from tailrace.policies.families.registry import Policies
from tailrace.policies.models.length_belief import Known, LengthLaw
from tailrace.policies.protocol.length_stats import batch_lengths
from tailrace.policies.protocol.views import LengthsView


class LengthTracker:
    """Writes the length fields of buffer records. Computes classes only for drafting policies that read them."""

    def __init__(self, policies: Policies, buffer: RequestBuffer):
        self._policy, self._buffer = policies.lengths, buffer
        self._classes = policies.drafting.reads_classes
        self._reads_all = policies.lengths.reads_all
        self._sums_up = self._classes or self._reads_all
        self._recent: deque[Known] | None = deque(maxlen=KNOWN_PROMPTS) if policies.lanes.on else None

    # ---- the law of a batch --------------------------------------------------------------------------

    def remember(self, prompts: Iterable[Known]) -> None:
        """Keeps lengths for the law of later batches, if lanes need one: the newest KNOWN_PROMPTS prompts'."""
        if self._recent is not None:
            self._recent += [known for known in prompts if known[1]]

    def law(self, batch: Batch, min_answers: int) -> LengthLaw | None:
        """Returns the law of the lengths in a batch: of its prompts' last epoch, and of the batches before it; None if
        those are fewer than `min_answers`.
        """
        own = [(group.spec.past_lengths, ()) for group in batch.groups.values()]
        return LengthLaw.of([*(self._recent or ()), *own], batch.max_tokens, min_answers)

    # ---- expected lengths ----------------------------------------------------------------------------

    def admit(self, batch: Batch, groups: list[Group]) -> None:
        """Adds the new groups of a batch, which has them already."""
        batch.new_lengths += sum(len(epoch) for group in groups for epoch in group.spec.past_lengths)
        self._summarise_if_doubled(batch)
        for group in groups:
            self._renew(group, batch)

    def queue(self, sample: Sample) -> None:
        """Renews the estimate of a sample that is about to wait."""
        group = sample.group
        view = self._view(group, self._buffer.batches[group.batch_id]) if self._reads_all else group.lengths
        sample.expected_tokens = self._expected(view, sample.generated_tokens)

    def finish(self, sample: Sample) -> list[Sample]:
        """Records the length of a sample that has ended by itself. Returns its waiting mates, with renewed
        estimates.
        """
        group = sample.group
        batch = self._buffer.batches[group.batch_id]
        group.finished_lengths = tuple(sorted((*group.finished_lengths, sample.generated_tokens)))
        batch.new_lengths += 1
        self._summarise_if_doubled(batch)
        return self._renew_all(group)

    def begin_turn(self, sample: Sample) -> list[Sample]:
        """Records a further turn of a sample. Returns its waiting mates if their estimates have changed."""
        group = sample.group
        if sample.max_tokens <= group.max_tokens:
            return []
        group.max_tokens = sample.max_tokens
        return self._renew_all(group)

    def _renew_all(self, group: Group) -> list[Sample]:
        """Renews the estimates of a group's waiting samples. Returns those."""
        view = self._renew(group, self._buffer.batches[group.batch_id])
        waiting = [mate for mate in group.samples if mate.state is WAITING]
        for mate in waiting:
            mate.expected_tokens = self._expected(view, mate.generated_tokens)
        return waiting

    def _expected(self, view: LengthsView, generated: int) -> int:
        return checked_count(self._policy, "expected", self._policy.expected(view, generated), 0)

    def _view(self, group: Group, batch: Batch) -> LengthsView:
        running = ()
        if self._reads_all:
            running = tuple(mate.generated_tokens for mate in group.samples if mate.state is not ENDED)
        spec = group.spec
        return LengthsView(group.finished_lengths, running, spec.past_lengths, batch.lengths, group.max_tokens)

    def _renew(self, group: Group, batch: Batch) -> LengthsView:
        view = group.lengths = self._view(group, batch)
        group.expected_tokens = self._expected(view, 0)
        if self._classes:
            group.class_starts = class_starts(view)
        return view

    def _summarise_if_doubled(self, batch: Batch) -> None:
        if batch.lengths is None or (self._sums_up and batch.new_lengths > batch.lengths.answers):
            self._summarise(batch)

    def _summarise(self, batch: Batch) -> None:
        known = batch.groups.values() if self._sums_up else ()
        prompts = [*batch.known_lengths, *(group.known_lengths() for group in known)]
        batch.lengths = batch_lengths(prompts, batch.max_tokens)
        batch.new_lengths = 0
