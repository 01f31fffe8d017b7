"""A trainer's worker without a GPU: FSDP2 over gloo, and the calls of verl's `ActorRolloutRefWorker`."""

from collections.abc import Iterator

import tailrace_verl.weights
import torch
from stand_in import StandInClient
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray


class Sender(Worker):
    """`model`: folder. `stand_in`: the service is one. Each update sends other weights than the one before."""

    def __init__(self, model: str, stand_in: bool):
        super().__init__()
        initialize_global_process_group_ray(timeout_second=60, backend="cpu:gloo")
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        mesh = torch.distributed.init_device_mesh("cpu", (self.world_size,))
        for layer in (*self.model.model.layers, self.model):
            fully_shard(layer, mesh=mesh)
        self.engine = CheckpointEngineRegistry.new("tailrace", is_master=self.rank == 0, bucket_size=1 << 20)
        self.breaks, self.shared = False, {}
        if stand_in:
            tailrace_verl.weights.connect = StandInClient
        share_of = tailrace_verl.weights.share_of
        tailrace_verl.weights.share_of = lambda *args: self._seen(share_of(*args))

    def _seen(self, share) -> Iterator[tuple[str, torch.Tensor]]:
        self.shared = {}
        for name, tensor in share:
            self.shared[name] = tensor.nbytes
            yield name, tensor
        if self.breaks and self.rank == 1:
            raise RuntimeError("no memory is left")

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As verl's FSDPEngine yields them: whole on every rank, one after the other."""
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.5)
        return await self.engine.send_weights(self._gathered(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def break_next(self, breaks: bool) -> None:
        self.breaks = breaks

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def share(self) -> dict[str, int]:
        """The bytes of the tensors that this rank has published last, by name."""
        return self.shared

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._gathered()}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.engine, method)(*args, **kwargs)
