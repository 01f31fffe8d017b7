"""The actor that vLLM's `RayVLLMWeightSyncClient` drives: a service looks to a trainer like one vLLM engine.

    receiver = weights_receiver("tailrace")
    client = RayVLLMWeightSyncClient(receiver)                # vLLM 0.32, vllm.distributed.weight_transfer.clients
    engine = WeightTransferTrainerFactory.trainer_init(MemoryTrainerInitInfo(rank=0), client=client, source=source)
    engine.send_weights()

Invariant: an update is committed by `finish_weight_update` alone, as the version after the present one; an update that
breaks off before leaves the service as it was. With `nccl` and `ipc` the engines' own workers take the tensors.
"""

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.rollout import WeightsLoaded


class WeightsReceiver:
    """The methods of a vLLM engine. Their arguments are vLLM's `WeightTransferInitRequest` and
    `WeightTransferUpdateRequest`.
    """

    def __init__(self, app_name: str):
        self._client = RolloutClient(app_name)
        self._loaded: WeightsLoaded | None = None

    async def init_weight_transfer_engine(self, request) -> None:
        await self._client.transfer_weights("init", request.init_info)

    async def start_weight_update(self) -> None:
        """Starts an update. An update that is still open has broken off: nothing of it was committed."""
        await self._client.transfer_weights("start")

    async def update_weights(self, request) -> None:
        await self._client.transfer_weights("part", request.update_info)

    async def finish_weight_update(self) -> None:
        """Commits. Raises WeightsRejected, with the reason, if the service refuses; its former weights then stay."""
        self._loaded = await self._client.finish_transfer()

    async def shutdown_weight_transfer_engine(self) -> None:
        await self._client.transfer_weights("shutdown")

    async def update_weight_version(self, version: str) -> None:
        """Serves the present weights under a number of the trainer's: they are loaded again if it is a higher one."""
        self._loaded = await self._client.rename_weights(version)

    async def loaded(self) -> WeightsLoaded | None:
        """Returns the answer to the last update."""
        return self._loaded


def weights_receiver(app_name: str = "tailrace"):
    """Returns the handle of a new receiver on this node, for `RayVLLMWeightSyncClient`. It ends with its last
    handle.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(WeightsReceiver).options(num_cpus=0, scheduling_strategy=here).remote(app_name)
