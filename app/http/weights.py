"""The service's weights over HTTP: which are served, and whether a request may run under them."""

from functools import partial

from pydantic import BaseModel, ConfigDict

from tailrace.app.calls.own_weights import OwnWeights
from tailrace.app.calls.refused import RolloutRejected, WeightsRejected
from tailrace.app.calls.resume import Interrupted
from tailrace.app.http.gateway_connection import GatewayConnection
from tailrace.app.http.refused import GivenUp
from tailrace.app.http.weights_answer import loaded_of
from tailrace.deployments.messages.rollout import BatchSettings, WeightsLoaded
from tailrace.deployments.messages.session import SampleAnswer


class WeightInfo(BaseModel):
    """The weights that are served. `digest`: names their content; empty until a replica has read it."""

    model_config = ConfigDict(frozen=True)
    version: int
    digest: str


class GatewayWeights:
    """Remembers the client's last update, which no request may run below."""

    def __init__(self, connection: GatewayConnection):
        self._connection = connection
        self._own = OwnWeights(partial(_load, connection), partial(_served, connection))

    async def info(self) -> WeightInfo:
        """Returns version and digest of the weights that are served."""
        return await _info(self._connection)

    async def update(self, version: int, source: str) -> WeightsLoaded:
        """Has the service load the folder `source`. Raises WeightsRejected."""
        return await self._own.update(version, str(source))

    async def expect(self, version: int) -> None:
        """Raises RolloutRejected if other weights are served, and this client cannot load them."""
        served = (await self.info()).version
        if served != version and (served > version or not await self._own.restore(version)):
            raise _refused(version, served)

    def lowest(self, settings: BatchSettings) -> int:
        """Returns the lowest version under which a request may begin that is sent now."""
        return max(settings.min_weights_version, self._own.version)

    async def check(self, settings: BatchSettings, lowest: int, answers: list[SampleAnswer]) -> None:
        """Raises an error if tokens are of lower weights than `lowest`, as of their request: Interrupted if the service
        has these again, RolloutRejected otherwise, and if samples began under other weights than the settings allow. A
        sample in flight keeps its tokens when this client updates.
        """
        made_by = min((part.weights_version for one in answers for part in one.sample.segments), default=lowest)
        if made_by >= lowest:
            begun = {one.sample.segments[0].weights_version for one in answers if one.sample.segments}
            if settings.weights_version is not None and (others := begun - {settings.weights_version}):
                raise _refused(settings.weights_version, min(others))
            return
        refused = RolloutRejected(f"the service holds weights {made_by}, and {lowest} or higher is asked for")
        if self._own.version < lowest or not await self._own.restore(None):
            raise refused
        raise Interrupted(refused)


async def _info(connection: GatewayConnection) -> WeightInfo:
    found = await connection.ask("GET", "/weight_info")
    return WeightInfo(version=int(found["weight_version"]), digest=found["weights_digest"])


async def _served(connection: GatewayConnection) -> int:
    return (await _info(connection)).version


def _refused(wanted: int, served: int) -> RolloutRejected:
    return RolloutRejected(f"weights_version {wanted} is asked for, and the service holds {served}")


async def _load(connection: GatewayConnection, version: int, source: str, digest: str) -> WeightsLoaded:
    """Has the service load a folder. `digest` is not sent, since no route takes it."""
    try:
        return loaded_of(await connection.ask("POST", "/update_weights", {"weight_dir": source, "version": version}))
    except (RolloutRejected, GivenUp) as error:
        raise WeightsRejected(str(error)) from error
