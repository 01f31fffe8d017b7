"""An ordering of one's own: the waiting sample with the fewest expected tokens left starts next."""

from typing import Literal

from pydantic import Field

from tailrace.policies.families.ordering import OneLane
from tailrace.policies.protocol.views import GroupView, SampleView


class ShortestFirst(OneLane):
    """Fewest expected tokens left first; `head_start` tokens are taken off samples that have begun."""

    type: Literal["shortest_first"] = "shortest_first"
    head_start: int = Field(0, ge=0, description="tokens by which a sample that has begun counts as shorter")

    def keys(self, sample: SampleView, group: GroupView) -> tuple[tuple, ...]:
        """One key, since there is one lane. The smallest key starts first."""
        left = sample.expected_tokens - sample.generated_tokens
        begun = self.head_start if sample.generated_tokens else 0
        return ((left - begun, sample.arrival, sample.index),)
