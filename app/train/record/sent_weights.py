"""Steps of the weights by their digest, over all starts of a run."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from tailrace.app.train.record.ledger import Staleness
from tailrace.app.train.record.row_file import RowFile
from tailrace.deployments.messages.rollout import SampleResult


class SentWeights(BaseModel):
    """`step`: number of optimizer updates that the weights have."""

    model_config = ConfigDict(frozen=True)
    step: int
    version: int
    digest: str


def staleness(
    rows: RowFile[SentWeights], step: int, samples: Sequence[SampleResult], ended: Sequence[int]
) -> Staleness:
    """Returns the staleness of samples used after `step` updates. `ended`: updates of the weights that the service had
    when each one's group ended. Weights that are not in `rows` count as the step's own.
    """
    steps = {row.digest: row.step for row in rows.rows}
    ages = [
        (step - steps.get(segment.weights_digest, step), step - at, segment.end - segment.start)
        for sample, at in zip(samples, ended, strict=True)
        for segment in sample.segments
    ]
    tokens = max(1, sum(count for *_, count in ages))
    mean = sum(age * count for age, _, count in ages) / tokens
    queued = sum(min(age, queued) * count for age, queued, count in ages) / tokens
    oldest = max((age for age, _, count in ages if count), default=0)
    return Staleness(mean=mean, max=oldest, in_flight=mean - queued, in_queue=queued)
