"""The weights that a client has given the service last: a service that was restarted without them gets them again."""

from collections.abc import Awaitable, Callable

from tailrace.app.calls.refused import WeightsRejected
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.messages.scores import Score
from tailrace.deployments.messages.status import ServiceSnapshot


class OwnWeights:
    """`load`: has the service load a version from a source, with a digest or an empty one, and a score if given.
    `served`: returns the version that the service holds.
    """

    def __init__(self, load: Callable[..., Awaitable[WeightsLoaded]], served: Callable[[], Awaitable[int]]):
        self._load, self._served = load, served
        self._last: tuple[int, str, str] | None = None  # version, source, digest

    @property
    def version(self) -> int:
        """Version of the last update; 0 without one."""
        return self._last[0] if self._last else 0

    async def update(self, version: int, source: str, digest: str = "", score: Score = ()) -> WeightsLoaded:
        """Has the service load weights, and remembers them."""
        answer = await self._load(version, source, digest, *((score,) if score else ()))
        self.remember(version, source, answer.digest)
        return answer

    def remember(self, version: int, source: str, digest: str) -> None:
        """Remembers weights that the service has loaded, unless later ones are known."""
        if self._last is None or version >= self._last[0]:  # else a later update was answered before this one
            self._last = version, source, digest

    async def rename(self, version: str, status: ServiceSnapshot) -> WeightsLoaded:
        """See `RolloutClient.rename_weights`."""
        if not version.isdecimal():
            raise ValueError(f"weight version {version!r}: give a number, {status.weights_version} or above")
        if not status.weights_source:
            raise ValueError(f"weight version {version}: the weights are those of the start; update them first")
        return await self.update(int(version), status.weights_source, status.weights_digest)

    async def restore(self, wanted: int | None, lowest: int = 0) -> bool:
        """Loads them again, unless the service has later ones by then. Returns False if there are none, or if a request
        wants another version or `lowest` and these are lower.
        """
        if self._last is None or wanted not in (None, self.version) or self.version < lowest:
            return False
        try:
            await self.update(*self._last)
        except WeightsRejected:
            if wanted is not None or await self._served() <= self.version:
                raise  # else another client was quicker
        return True


async def served_version(ask: Callable[..., Awaitable]) -> int:
    """Returns the version that the service holds. `ask`: calls the coordinator, by name."""
    return (await ask("status")).weights_version
