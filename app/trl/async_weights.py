"""Sends weights of a TRL `AsyncGRPOTrainer` to the service: `AsyncGRPOTrainer(..., weight_transfer=AsyncWeights())`.

Upstream symbol: `WeightTransferProtocol` of trl/experimental/async_grpo/async_grpo_trainer.py. Invariant: versions
count on from the service's, one for each `send_weights`. Samples in flight continue under the new ones.
"""

from collections.abc import Iterator
from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.app.trl.weights_transport import WeightsTransport


class AsyncWeights:
    """`weights_dir`: a folder that all nodes of the service see, or None for memory.

    `version`: the service's version of the last weights sent.
    """

    def __init__(self, client: RolloutClient, weights_dir: Path | str | None = None):
        self._client, self._transport = client, WeightsTransport(client, weights_dir)
        self.version: int | None = None

    def init_weight_transfer(self) -> None:
        """Reads the service's version. Called before the first weights are sent."""
        self.version = self._client.status_blocking().weights_version

    def pause(self) -> None:
        """Does nothing: the service loads weights between two steps of its engines."""

    def send_weights(self, iterator: Iterator[tuple[str, object]]) -> None:
        """Loads (name, torch tensor) pairs on every replica. Raises WeightsRejected; the old weights then stay."""
        if self.version is None:
            self.init_weight_transfer()
        self.version = self._transport.send(self.version + 1, iterator).version

    def resume(self) -> None:
        """Does nothing, as `pause`."""

    def destroy(self) -> None:
        """Does nothing: replicas that start later load the last weights from where they were sent."""
