"""The samples of an open batch between two turns, and which of them a request continues.

Invariant: a sample is here from the end of a turn until it returns or ends; only the last one of a group and index. A
prompt continues a sample if it begins with all of the sample's context, features included, under the same sampling
parameters and adapter. Owned by `OpenBatch`.
"""

import numpy as np

from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.batches.records import SampleRecord
from tailrace.deployments.features.prompt_features import continues
from tailrace.deployments.messages.adapters import digest_of
from tailrace.deployments.messages.session import SampleRequest
from tailrace.policies.protocol.events import SampleReturned


class HeldRecords:
    def __init__(self):
        self._held: dict[tuple[str, int], tuple[str, SampleRecord]] = {}  # by group name and index

    def hold(self, sample_id: str, sample: SampleRecord) -> None:
        self._held[_place(sample)] = sample_id, sample

    def drop(self, sample_id: str, sample: SampleRecord) -> None:
        """Removes a sample that returns or has ended, if it is here."""
        if self._held.get(_place(sample), ("",))[0] == sample_id:
            del self._held[_place(sample)]

    def of(self, name: str | None = None, index: int | None = None) -> list[str]:
        """Returns the ids of all samples, or of one group's, or of the one with this index."""
        if name is not None and index is not None:  # called for each new request, so it does not scan all
            return [self._held[name, index][0]] if (name, index) in self._held else []
        return [
            sample_id
            for (group, of), (sample_id, _) in self._held.items()
            if name in (None, group) and index in (None, of)
        ]

    def returning(self, prepared: Prepared, request: SampleRequest, now_s: float) -> SampleReturned | None:
        """Returns the event by which a request continues its held sample in the core, or None if there is no such
        sample.
        """
        sample_id, sample = self._held.get((request.group.prompt_id, request.index), ("", None))
        if sample is None or sample.group.group.sampling != request.group.sampling:
            return None
        if digest_of(sample.group.adapter) != digest_of(prepared.adapter):
            return None
        context = sample.context()
        if not np.array_equal(context, prepared.token_ids[: len(context)]):
            return None
        if not continues(sample.features, prepared.features, len(context)):
            return None
        outside_tokens = len(prepared.token_ids) - len(context)
        return SampleReturned(now_s, sample_id, outside_tokens, prepared.max_tokens, request.hold_s)


def _place(sample: SampleRecord) -> tuple[str, int]:
    return sample.group.group.prompt_id, sample.index
