"""Draft modes of the next chunks, and the expected gain of draft models, by the `draft_models` policy.

The mean acceptance of draft models comes from the replicas' reports. Invariant: acceptance counts only tested draft
tokens. A sample's own acceptance is mixed with the mean; its weight grows with its tested drafts. Called by the core's
books.
"""

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import RequestBuffer, Sample
from tailrace.policies.families.draft_models import DraftModels
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.performance import chance
from tailrace.policies.protocol.views import DraftModelsView, RolesView


class DraftPlanner:
    """Draft modes of chunks, and the mean acceptance of draft models."""

    def __init__(self, policy: DraftModels, table: ReplicaTable, buffer: RequestBuffer):
        self._policy, self._table, self._buffer = policy, table, buffer
        self._drafters = 0

    def expect_drafters(self, drafters: int) -> None:
        """Sets the number of draft models in the tail policy's last decision; 0 if it decides none."""
        self._drafters = drafters

    def next(self, sample: Sample, replica_id: str) -> tuple[DraftMode | None, str]:
        """Returns the mode of the sample's chunk that starts on the replica now, and the reason.

        All samples that have not ended share engines and draft models.
        """
        if not self._policy.replicas:
            return None, ""
        samples, engines, drafters = self._buffer.unended, self._table.staying, self._drafters or self._policy.replicas
        on_engine = min(-(-samples // max(1, engines)), self._table.max_running(replica_id))
        on_drafter = -(-min(samples, on_engine * engines) // max(1, drafters))
        mean = self._mean
        own = chance(sample.model_accepted, sample.model_tested, mean)
        view = DraftModelsView(on_engine, on_drafter, mean, self._table.performance(replica_id))
        return self._policy.way(view, own)

    def outlook(self, running: int, least: int, most: int) -> tuple[RolesView, ...]:
        """Returns the splits of `most` replicas that gain, for `running` chunks on at least `least` engines.

        `least` engines have room for the chunks. Each pace is tried with the fewest engines, and with drafters by
        powers of two up to the policy's limit.
        """
        if not self._policy.replicas:
            return ()
        mean, known = self._mean, self._table.any_performance()
        cuts = [
            (engines, drafters, DraftModelsView(-(-running // engines), -(-running // drafters), mean, known))
            for engines in fewest(running, max(1, least), most - 1)
            for drafters in doubling(min(self._policy.replicas, most - engines))
        ]
        found = (RolesView(*cut, self._policy.gain(view)) for *cut, view in cuts)
        return tuple(view for view in found if view.gain > 1.0)

    @property
    def _mean(self) -> float:
        return self._table.chance(DraftMethod.MODEL, self._policy.acceptance)


def fewest(running: int, least: int, most: int) -> list[int]:
    """Returns the fewest replicas, from `least` to `most`, for each number of chunks on the fullest replica."""
    return [n for n in range(least, most + 1) if n == least or -(-running // n) < -(-running // (n - 1))]


def doubling(most: int) -> list[int]:
    """Returns the powers of two up to `most`, and `most`."""
    return sorted({1 << power for power in range(most.bit_length())} | {most} if most > 0 else set())
