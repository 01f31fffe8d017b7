"""Replay of the rollout's routed experts (R3) in FSDP, for which verl 0.9.1 has none.

`actor_rollout_ref.model.external_lib=tailrace_verl.replaying_engine` loads this file, and verl's registry then takes
the engine for the vendor of the accelerator before its own. Invariant: what gradient checkpointing computes again of a
pass has the routes of the pass. Tokens without routes, among them padding, have the trainer's own choice.
"""

import os
from contextlib import ExitStack

import torch
from tensordict import TensorDict
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from verl.utils.device import get_vendor
from verl.utils.ulysses import slice_input_tensor
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from tailrace.app.trl.route_replay import OWN, replayed_routes
from tailrace_verl.routes import KEY

VENDOR = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], ["cuda", "npu"], VENDOR)
class ReplayingEngine(FSDPEngineWithLMHead):
    """Replays in the passes of the actor: those with a gradient, and those of the old log probabilities. Not in those
    of a reference model of its own.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._replayed = ExitStack()

    def forward_backward_batch(self, *args, **kwargs):
        with self._replayed:
            return super().forward_backward_batch(*args, **kwargs)

    def prepare_model_inputs(self, micro_batch: TensorDict):
        """Replays from here to the next micro batch, which is after the backward pass. Raises ValueError without
        routes.
        """
        inputs, outputs = super().prepare_model_inputs(micro_batch)
        self._replayed.close()
        if not self.engine_config.forward_only:
            routes = micro_batch.get("routed_experts", None)
            if routes is None:
                raise ValueError(f"{KEY}: there are no routes to replay; set it, or remove model.external_lib")
            placed = placed_routes(routes, outputs.get("pad_size"))
            if self.use_ulysses_sp:
                placed = slice_input_tensor(placed, 1, padding=False)
            self._replayed.enter_context(replayed_routes(self.module, placed))
        return inputs, outputs


def placed_routes(routes: torch.Tensor, padding: int | None) -> torch.Tensor:
    """int16 [rows, tokens, layers, experts of a token], placed as the model's input ids are; OWN where there are none.

    `routes`: jagged [samples, tokens, layers, experts of a token], zeros where verl had none. `padding`: tokens after
    the samples, which are one row; None if each sample is a row, padded to the longest.
    """
    values = routes.values()
    values = torch.where(values.flatten(1).any(1)[:, None, None], values, OWN)
    if padding is not None:
        return pad(values, (0, 0, 0, 0, 0, padding), value=OWN)[None]
    samples = values.split(routes.offsets().diff().tolist())
    return pad_sequence(samples, batch_first=True, padding_value=OWN)
