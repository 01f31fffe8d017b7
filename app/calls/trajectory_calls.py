"""The coordinator's calls for trajectories, which gateways make. Each may be repeated."""

from tailrace.app.calls.connection import Connection
from tailrace.deployments.messages.trajectory import TrajectoryOpening, TrajectoryState, TrajectoryTurn


class TrajectoryCalls:
    """See `deployments.batches.trajectories`."""

    def __init__(self, connection: Connection):
        self._connection = connection

    async def open(self, opening: TrajectoryOpening, left_s: float, turns: tuple[TrajectoryTurn, ...] = ()) -> None:
        await self._connection.ask("open_trajectory", opening, left_s, turns)

    async def read(self, name: str, epoch: str = "", known: int = 0) -> TrajectoryState:
        return await self._connection.ask("read_trajectory", name, epoch, known)

    async def add(self, name: str, epoch: str, turn: TrajectoryTurn) -> int | None:
        return await self._connection.ask("add_turn", name, epoch, turn)

    async def end(self, name: str, reward: float | None) -> TrajectoryState:
        return await self._connection.ask("end_trajectory", name, reward)
