"""Calls of one rank that publishes a version of the weights together with others; see `tailrace.weights.publish`."""

from tailrace.app.calls.connection import Connection
from tailrace.app.calls.own_weights import OwnWeights
from tailrace.app.calls.refused import accepted
from tailrace.app.calls.staged_weights import Staging
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.staging.slots import MemorySource


class PublishCalls:
    """`own`: remembers the version, which any rank's client can give to a service that was restarted."""

    def __init__(self, connection: Connection, own: OwnWeights, staging: Staging):
        self._connection, self._own, self._staging = connection, own, staging

    async def run(self, phase: str, version: int, rank: int, content: object = None) -> object:
        """Runs one phase. `phase`, `content` and the answer: see `deployments.messages.pieces.PublishPhase`.

        Raises WeightsRejected, one line, once the version has ended without being loaded.
        """
        answer = await self._connection.send("publish_weights", phase, version, rank, content)
        if isinstance(accepted(answer, "publish_weights"), WeightsLoaded):
            source = MemorySource(self._staging.name(), version, answer.digest)
            self._own.remember(version, str(source), answer.digest)
        return answer
