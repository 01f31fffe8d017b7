"""Steps of the weights by their digest, over all starts of a run."""

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


def staleness(rows: RowFile[SentWeights], step: int, samples: list[SampleResult]) -> Staleness:
    """Returns the staleness of samples used after `step` updates. Weights that are not in `rows` count as the step's
    own.
    """
    steps = {row.digest: row.step for row in rows.rows}
    ages = [
        (step - steps.get(segment.weights_digest, step), segment.end - segment.start)
        for sample in samples
        for segment in sample.segments
    ]
    tokens = sum(count for _, count in ages)
    return Staleness(
        mean=sum(age * count for age, count in ages) / tokens if tokens else 0.0,
        max=max((age for age, count in ages if count), default=0),
    )
