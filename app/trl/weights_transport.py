"""Transport of a trainer's weights to the service: through memory, or through a folder that all nodes see."""

from collections.abc import Iterable
from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.app.trl.weights_folders import WeightsFolders
from tailrace.deployments.messages.rollout import WeightsLoaded


class WeightsTransport:
    """`weights_dir`: the folder, or None for memory."""

    def __init__(self, client: RolloutClient, weights_dir: Path | str | None):
        self._client = client
        self._folders = None if weights_dir is None else WeightsFolders(Path(weights_dir))

    def send(self, version: int, tensors: Iterable[tuple[str, object]]) -> WeightsLoaded:
        """Loads (name, torch tensor) pairs on every replica. Raises WeightsRejected; the old weights then stay."""
        if self._folders is None:
            return self._client.send_weights_blocking(version, tensors)
        return self._client.update_weights_blocking(version, str(self._folders.write(version, tensors)))
