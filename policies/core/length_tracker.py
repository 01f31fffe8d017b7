"""The lengths that have been seen, of each group and of each batch, and what the `lengths` policy makes of them.

Invariant: a waiting sample's `expected_tokens` is the policy's answer as of its last chunk or its last finished mate,
whichever came later; a batch's summary is renewed as the evidence doubles, so that it costs little however many
samples there are. Called by `RolloutCore` alone.
"""

from tailrace.policies.core.request_buffer import ENDED, WAITING, Batch, Group, RequestBuffer, Sample
from tailrace.policies.families.lengths import class_starts
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.length_stats import batch_lengths
from tailrace.policies.protocol.views import LengthsView


class LengthTracker:
    """Writes what buffer records say of lengths. Classes are worked out for drafting policies that go by them."""

    def __init__(self, policies: Policies, buffer: RequestBuffer):
        self._expected, self._buffer = policies.lengths.expected, buffer
        self._classes = policies.drafting.reads_classes
        self._reads_all = policies.lengths.reads_all
        self._sums_up = self._classes or self._reads_all

    def admit(self, groups: list[Group]) -> None:
        """The groups of a new batch."""
        batch = self._buffer.batches[groups[0].batch_id]
        self._summarise(batch)
        for group in groups:
            self._renew(group, batch)

    def queue(self, sample: Sample) -> None:
        """The sample is about to wait."""
        group = sample.group
        view = self._view(group, self._buffer.batches[group.batch_id]) if self._reads_all else group.lengths
        sample.expected_tokens = self._expected(view, sample.generated_tokens)

    def finish(self, sample: Sample) -> list[Sample]:
        """The sample has ended by itself: its group knows one more length, and its waiting mates, which are returned,
        are seen again."""
        group = sample.group
        batch = self._buffer.batches[group.batch_id]
        group.finished_lengths = tuple(sorted((*group.finished_lengths, sample.generated_tokens)))
        batch.new_lengths += 1
        if self._sums_up and batch.new_lengths > batch.lengths.answers:
            self._summarise(batch)
        view = self._renew(group, batch)
        waiting = [mate for mate in group.samples if mate.state is WAITING]
        for mate in waiting:
            mate.expected_tokens = self._expected(view, mate.generated_tokens)
        return waiting

    def _view(self, group: Group, batch: Batch) -> LengthsView:
        running = ()
        if self._reads_all:
            running = tuple(mate.generated_tokens for mate in group.samples if mate.state is not ENDED)
        spec = group.spec
        return LengthsView(group.finished_lengths, running, spec.past_lengths, batch.lengths, spec.max_tokens)

    def _renew(self, group: Group, batch: Batch) -> LengthsView:
        view = group.lengths = self._view(group, batch)
        group.expected_tokens = self._expected(view, 0)
        if self._classes:
            group.class_starts = class_starts(view)
        return view

    def _summarise(self, batch: Batch) -> None:
        known = batch.groups if self._sums_up else ()
        prompts = [(group.spec.past_lengths, group.finished_lengths) for group in known]
        batch.lengths = batch_lengths(prompts, max(group.spec.max_tokens for group in batch.groups))
        batch.new_lengths = 0
