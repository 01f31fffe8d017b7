"""Weights of a TRL `AsyncGRPOTrainer`, brought to the service: `AsyncGRPOTrainer(..., weight_transfer=AsyncWeights())`.

Upstream symbol: `WeightTransferProtocol` of trl/experimental/async_grpo/async_grpo_trainer.py. Invariant: versions
count on from the one that the service has, one for each `send_weights`. Samples under way continue under the new ones.
"""

from collections.abc import Iterator
from pathlib import Path

from tailrace.app.client import RolloutClient
from tailrace.app.trl.weights_folders import WeightsFolders


class AsyncWeights:
    """`weights_dir`: a folder that all nodes of the service see. `version`: the service's, of the last weights sent."""

    def __init__(self, client: RolloutClient, weights_dir: Path | str):
        self._client, self._folders = client, WeightsFolders(Path(weights_dir))
        self.version: int | None = None

    def init_weight_transfer(self) -> None:
        """Called before the first weights are sent."""
        self.version = self._client.status_blocking().weights_version

    def pause(self) -> None:
        """Nothing: the service loads weights between two steps of its engines."""

    def send_weights(self, iterator: Iterator[tuple[str, object]]) -> None:
        """Load (name, torch tensor) pairs on every replica. Raises WeightsRejected; the old weights then stay."""
        if self.version is None:
            self.init_weight_transfer()
        folder = self._folders.write(self.version + 1, iterator)
        self.version = self._client.update_weights_blocking(self.version + 1, str(folder)).version

    def resume(self) -> None:
        """Nothing, as for `pause`."""

    def destroy(self) -> None:
        """Nothing: replicas that start later read the last folder."""
