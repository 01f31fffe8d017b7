"""A trainer's worker without a GPU: the calls of verl's `ActorRolloutRefWorker` around a checkpoint engine."""

import torch
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register


class Sender(Worker):
    """`model`: folder. Each update sends other weights than the one before."""

    def __init__(self, model: str):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.engine = CheckpointEngineRegistry.new("tailrace", is_master=self.rank == 0, bucket_size=1 << 20)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.5)
        return await self.engine.send_weights(self.model.named_parameters(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.engine, method)(*args, **kwargs)
