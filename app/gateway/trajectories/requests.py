"""Bodies of the routes of trajectories."""

from pydantic import Field

from tailrace.app.gateway.edge.fields import RequestBody
from tailrace.deployments.messages.message import MAX_NUMBER
from tailrace.deployments.messages.session import MAX_INDEX
from tailrace.deployments.messages.trajectory import TrajectoryLimits, TrajectorySampling


class OpenRequest(RequestBody):
    """`POST /v1/trajectories`. `group`: by default one of its own."""

    group: str | None = Field(None, min_length=1, max_length=1_000)
    index: int = Field(0, ge=0, le=MAX_INDEX, description="of the trajectory in its group")
    seed: int = Field(0, ge=0, le=MAX_NUMBER)
    step: int = Field(0, ge=0, le=MAX_NUMBER)
    weights_version: int | None = Field(None, ge=0, le=MAX_NUMBER, description="turns begin under no other; null: any")
    model: str | None = Field(None, min_length=1, description="the model or an adapter; a harness may name any model")
    limits: TrajectoryLimits = TrajectoryLimits()
    sampling: TrajectorySampling = TrajectorySampling()


class RewardRequest(RequestBody):
    """`POST /v1/trajectories/ID/reward`."""

    reward: float
