"""The samples of an open batch between two turns, and which of them a request continues.

Invariant: a sample is here from the end of a turn until it returns or ends; only the last one of a group and index,
unless it is held without a time: then its branches are here, too. A prompt continues a sample if it begins with all of
the sample's context, features included, under the same sampling parameters and adapter. Owned by `OpenBatch`.
"""

from math import inf

import numpy as np

from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.batches.records import SampleRecord, shared_tokens
from tailrace.deployments.features.prompt_features import continues
from tailrace.deployments.messages.adapters import digest_of
from tailrace.deployments.messages.session import SampleRequest
from tailrace.policies.protocol.events import SampleReturned


class HeldRecords:
    def __init__(self):
        self._held: dict[tuple[str, int], dict[str, SampleRecord]] = {}  # by group name and index; by sample id

    def hold(self, sample_id: str, sample: SampleRecord) -> None:
        beside = self._held.get(_place(sample), {}) if sample.hold_s == inf else {}
        self._held[_place(sample)] = beside | {sample_id: sample}

    def drop(self, sample_id: str, sample: SampleRecord) -> None:
        """Removes a sample that returns or has ended, if it is here."""
        held = self._held.get(_place(sample), {})
        if held.pop(sample_id, None) is not None and not held:
            del self._held[_place(sample)]

    def of(self, name: str | None = None, index: int | None = None) -> list[str]:
        """Returns the ids of all samples, or of one group's, or of those with this index."""
        if name is not None and index is not None:  # called for each new request, so it does not scan all
            return list(self._held.get((name, index), ()))
        return [
            sample_id
            for (group, of), held in self._held.items()
            if name in (None, group) and index in (None, of)
            for sample_id in held
        ]

    def returning(self, prepared: Prepared, request: SampleRequest, now_s: float) -> SampleReturned | None:
        """Returns the event by which a request continues a held sample in the core, the one with the longest context,
        or None if there is no such sample.
        """
        held = self._held.get((request.group.prompt_id, request.index), {})
        found = [
            (_context_tokens(one), sample_id) for sample_id, one in held.items() if _goes_on(one, prepared, request)
        ]
        if not found:
            return None
        context_tokens, sample_id = max(found)
        outside_tokens = len(prepared.token_ids) - context_tokens
        return SampleReturned(now_s, sample_id, outside_tokens, prepared.max_tokens, request.held_s)

    def nearest(self, prepared: Prepared, request: SampleRequest) -> str | None:
        """Returns the held sample from which a request branches: the one that it shares the most tokens with."""
        held = self._held.get((request.group.prompt_id, request.index), {})
        shared = [(shared_tokens(one.context(), prepared.token_ids), sample_id) for sample_id, one in held.items()]
        return max(shared)[1] if shared else None


def _goes_on(sample: SampleRecord, prepared: Prepared, request: SampleRequest) -> bool:
    if sample.group.group.sampling != request.group.sampling:
        return False
    if digest_of(sample.group.adapter) != digest_of(prepared.adapter):
        return False
    context = sample.context()
    same = np.array_equal(context, prepared.token_ids[: len(context)])
    return same and continues(sample.features, prepared.features, len(context))


def _context_tokens(sample: SampleRecord) -> int:
    return len(sample.prompt) + sample.tokens - sample.earlier_tokens


def _place(sample: SampleRecord) -> tuple[str, int]:
    return sample.group.group.prompt_id, sample.index
