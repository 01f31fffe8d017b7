"""Sends the weights of a trainer to the service, through shared memory or through a folder.

Invariant: versions count on from the service's, one for each step whose weights are sent.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tailrace.app.calls.client import RolloutClient
from tailrace.app.trl.trainer_weights import named_weights
from tailrace.app.trl.weights_transport import WeightsTransport
from tailrace.deployments.messages.rollout import WeightsLoaded


class WeightsSender:
    """`weights_dir`: a folder that all nodes see, or None for memory. `on_sent`: called with the step and the
    answer.
    """

    def __init__(
        self,
        trainer,
        client: RolloutClient,
        weights_dir: Path | str | None = None,
        on_sent: Callable[[int, WeightsLoaded], None] = lambda step, loaded: None,
    ):
        self._trainer, self._client, self._on_sent = trainer, client, on_sent
        self._transport = WeightsTransport(client, weights_dir)
        self._step: int | None = None  # the trainer's step whose weights were sent last
        self.version: int | None = None
        self.digest = ""

    def send(self) -> None:
        """Sends the trainer's present weights to the service. Raises WeightsRejected; the old ones then stay.

        Nothing is sent twice for one step of the trainer.
        """
        step = self._trainer.state.global_step
        if step == self._step:
            return
        weights = named_weights(self._trainer)
        try:
            if self._trainer.accelerator.is_main_process:
                self._send(step, weights)
        finally:
            for _ in weights:  # gathering a sharded parameter needs every process, also after an error here
                pass
        self._step = step

    def _send(self, step: int, weights: Iterable[tuple[str, Any]]) -> None:
        if self.version is None:
            self.version = self._client.status_blocking().weights_version
        loaded = self._transport.send(self.version + 1, weights)
        self.version, self.digest = loaded.version, loaded.digest
        self._on_sent(step, loaded)
