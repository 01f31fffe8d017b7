"""The actor that vLLM's `RayVLLMWeightSyncClient` drives: a service looks to a trainer like one vLLM engine.

    receiver = weights_receiver("tailrace")
    client = RayVLLMWeightSyncClient(receiver)                # vLLM 0.32, vllm.distributed.weight_transfer.clients
    engine = WeightTransferTrainerFactory.trainer_init(MemoryTrainerInitInfo(rank=0), client=client, source=source)
    engine.send_weights()

Invariant: an update is committed by `finish_weight_update` alone, as the version after the present one; an update that
breaks off before leaves the service as it was. With `nccl` and `ipc` the engines' own workers take the tensors.
"""

from dataclasses import dataclass

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.staging.slots import is_memory, memory_source

MEMORY = "tailrace_memory"
"""Our transfer engine's name in vLLM's registry of trainer engines."""


@dataclass
class OpenUpdate:
    """Between `start_weight_update` and `finish_weight_update`. `source`: of weights that are staged whole."""

    source: str = ""


class WeightsReceiver:
    """The five methods. Their arguments are vLLM's `WeightTransferInitRequest` and `WeightTransferUpdateRequest`."""

    def __init__(self, app_name: str):
        self._client = RolloutClient(app_name)
        self._backend = ""
        self._update: OpenUpdate | None = None
        self._loaded: WeightsLoaded | None = None

    async def init_weight_transfer_engine(self, request) -> None:
        info = dict(request.init_info)
        self._backend = info.pop("backend", "") or _backend_of(info)
        if self._backend != MEMORY:
            await self._client.transfer_weights("init", info)

    async def start_weight_update(self) -> None:
        if not self._backend:
            raise RuntimeError("start_weight_update before init_weight_transfer_engine")
        if self._backend != MEMORY:
            await self._client.transfer_weights("start", None)
        self._update = OpenUpdate()  # one that was open has broken off: nothing of it was committed

    async def update_weights(self, request) -> None:
        update, info = self._opened(), request.update_info
        if self._backend != MEMORY:
            await self._client.transfer_weights("part", info)
        elif not is_memory(source := info.get("source")):
            raise ValueError(f"update_weights: source is {source!r}; the trainer engine {MEMORY} gives memory:...")
        else:
            update.source = source

    async def finish_weight_update(self) -> None:
        """Commits. Raises WeightsRejected, with the reason, if the service refuses; its former weights then stay."""
        update, self._update = self._opened(), None
        if self._backend != MEMORY:
            update.source = await self._client.transfer_weights("finish", None)
        if not update.source:
            raise RuntimeError("finish_weight_update without update_weights")
        staged = memory_source(update.source)
        self._loaded = await self._client.update_weights(staged.version, update.source, staged.digest)

    async def update_weight_version(self, version: str) -> None:
        """The present weights under a number of the trainer's: they are loaded again if it is a higher one."""
        if self._loaded is None or not version.isdecimal():
            raise ValueError(f"update_weight_version: {version!r}; give a number, after an update")
        if int(version) != self._loaded.version:
            status = await self._client.status()
            source = status.weights_source
            self._loaded = await self._client.update_weights(int(version), source, status.weights_digest)

    async def loaded(self) -> WeightsLoaded | None:
        """The answer to the last update."""
        return self._loaded

    def _opened(self) -> OpenUpdate:
        if self._update is None:
            raise RuntimeError("no weight update is open; call start_weight_update first")
        return self._update


def _backend_of(info: dict) -> str:
    """vLLM's trainer engines do not name themselves: NCCL's info says where to meet, IPC's only how it packs."""
    if "master_address" in info or "nccl_unique_id_b64" in info:
        return "nccl"
    if set(info) <= {"packed"}:
        return "ipc"
    raise ValueError(f"init_weight_transfer_engine: no transfer engine has {', '.join(sorted(info))}; known: nccl, ipc")


def weights_receiver(app_name: str = "tailrace"):
    """The handle of a new receiver on this node, for `RayVLLMWeightSyncClient`. It ends with its last handle."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(WeightsReceiver).options(num_cpus=0, scheduling_strategy=here).remote(app_name)
