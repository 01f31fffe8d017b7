"""The stepper's calls about its weights: loads, sleep, reading back, transfers. `EngineWeights` does the work."""

from tailrace.deployments.engine.engine_weights import EngineWeights
from tailrace.deployments.messages.chunk import WeightsRead
from tailrace.deployments.messages.transfer import Transfer


class WeightCalls:
    """`_weights`, `_running` and `reset_cache` belong to the stepper."""

    _weights: EngineWeights

    def load_weights(self, version: int, source: str, digest: str = "") -> None:
        """Loads weights, see EngineWeights.load. Raises RuntimeError while chunks run; nothing has changed then."""
        if self._running:
            raise RuntimeError(f"weights cannot change while {len(self._running)} chunks run")
        self._weights.load(version, source, digest)

    def fall_asleep(self) -> None:
        """Gives back the memory of weights and KV, until `load_weights` and `wake_kv`; no KV is kept.

        Raises ValueError, one line, while chunks run, and if the weights could not come back. Other errors are final.
        """
        if self._running or not self.reset_cache():
            raise ValueError(f"an engine cannot sleep while {len(self._running)} chunks run")
        self._weights.fall_asleep()

    def wake_kv(self) -> None:
        self._weights.wake_kv()

    def read_weights(self) -> WeightsRead:
        """Reads back the weights that the engine computes with. Takes seconds. Raises ValueError, one line."""
        return self._weights.read_back()

    def weights_refusal(self, source: str) -> str | None:
        return self._weights.refusal(source)

    def transfer_weights(self, transfer: Transfer) -> str:
        return self._weights.transfer(transfer)
