"""A trainer engine for vLLM's API that stages through shared memory, for trainers that drive engines by that API.

`register()` adds it to vLLM's `WeightTransferTrainerFactory` as `tailrace_memory`. Invariant: every rank iterates the
source to its end; only rank 0 stages and calls. Checked against vLLM 0.32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tailrace.app.calls.client import RolloutClient
from tailrace.app.weights.over_http import HttpWeights
from tailrace.deployments.messages.transfer import MEMORY


@dataclass
class MemoryTrainerInitInfo(TrainerInitInfo):
    """`app_name`: the Serve application; not used over HTTP."""

    backend: ClassVar[str] = MEMORY
    app_name: str = "tailrace"


class MemoryTrainerEngine(TrainerWeightTransferEngine[MemoryTrainerInitInfo]):
    """`client`: vLLM's `RayVLLMWeightSyncClient` over a `WeightsReceiver` of this node, or its
    `HTTPVLLMWeightSyncClient` with the address of a gateway on this machine; then Ray is not needed here."""

    init_info_cls = MemoryTrainerInitInfo

    def __init__(self, *, service: RolloutClient | HttpWeights | None, **upstream):
        super().__init__(**upstream)
        self._service = service

    @classmethod
    def trainer_init(
        cls, init_info: MemoryTrainerInitInfo, *, client, source: WeightSource | None = None
    ) -> "MemoryTrainerEngine":
        if source is None:
            raise ValueError(f"{MEMORY} needs a WeightSource")
        engine = cls(
            client=client,
            source=source,
            is_sender=init_info.is_sender,
            service=_service_of(client, init_info) if init_info.is_sender else None,
        )
        if engine.is_sender:
            client.init_weight_transfer_engine({"backend": MEMORY})
        return engine

    def send_weights(self) -> None:
        """Sends the weights. Raises the service's refusal; its former weights then stay."""
        weights = iter(self.source)
        try:
            if self.is_sender:
                self._send(weights)
        finally:
            for _ in weights:  # gathering a sharded parameter needs every rank, also after an error here
                pass

    def _send(self, weights: Iterator) -> None:
        self.client.start_weight_update()
        version = self._service.status_blocking().weights_version + 1
        staged = self._service.stage_weights_blocking(version, weights)
        try:
            self.client.update_weights({"source": str(staged.stage.seal())})
            self.client.finish_weight_update()
        finally:
            staged.drop()  # keeps a sealed slot, which the next stage may take from here on


def _service_of(client, init_info: MemoryTrainerInitInfo) -> RolloutClient | HttpWeights:
    return HttpWeights(client.base_url) if hasattr(client, "base_url") else RolloutClient(init_info.app_name)


def register() -> None:
    """Registers the engine. May be called again."""
    if MEMORY not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(MEMORY, MemoryTrainerEngine)
