"""The weights of a trainer, brought to the service through a folder.

Invariant: versions count on from the one that the service has, one for each call that sends.
"""

import time
from pathlib import Path

from tailrace.app.client import RolloutClient
from tailrace.app.trl.trainer_weights import named_weights
from tailrace.app.trl.weights_folders import WeightsFolders


class WeightsSender:
    """`weights_dir`: seen by all nodes of the service."""

    def __init__(self, trainer, client: RolloutClient, weights_dir: Path | str):
        self._trainer, self._client = trainer, client
        self._folders = WeightsFolders(Path(weights_dir))
        self.version: int | None = None
        self.digest = ""
        self.seconds = 0.0  # since the caller set it to 0
        self.steps: dict[int, int] = {}  # version -> updates of the optimizer that it has

    def send(self) -> None:
        """Bring the service to the trainer's present weights. Raises WeightsRejected; the old ones then stay."""
        if not self._trainer.accelerator.is_main_process:
            for _ in named_weights(self._trainer):  # gathering a sharded parameter needs every process
                pass
            return
        started = time.monotonic()
        if self.version is None:
            self.version = self._client.status_blocking().weights_version
        folder = self._folders.write(self.version + 1, named_weights(self._trainer))
        loaded = self._client.update_weights_blocking(self.version + 1, str(folder))
        self.version, self.digest = loaded.version, loaded.digest
        self.steps[self.version] = self._trainer.state.global_step
        self.seconds += time.monotonic() - started
