"""Sends the weights of a trainer to the service, through shared memory or through a folder.

Invariant: versions count on from the service's, one for each step whose weights are sent.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tailrace.app.calls.client import RolloutClient
from tailrace.app.trl.processes import for_all
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
        """Sends the trainer's present weights to the service, from its first process. Raises WeightsRejected there, and
        Failed in the others; the old ones then stay, and each process may call again.

        Nothing is sent twice for one step of the trainer.
        """
        step = self._trainer.state.global_step
        if step == self._step:
            return
        weights, accelerator = named_weights(self._trainer), self._trainer.accelerator
        if not accelerator.is_main_process:
            for _ in weights:  # its part in gathering sharded parameters
                pass
        for_all(accelerator, lambda: self._send(step, weights))
        self._step = step

    def _send(self, step: int, weights: Iterable[tuple[str, Any]]) -> None:
        try:
            if self.version is None:
                self.version = self._client.status_blocking().weights_version
            loaded = self._transport.send(self.version + 1, weights)
        finally:
            for _ in weights:  # gathering a sharded parameter needs every process, also after an error here
                pass
        self.version, self.digest = loaded.version, loaded.digest
        self._on_sent(step, loaded)
