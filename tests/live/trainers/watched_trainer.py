"""TRL's own `GRPOTrainer`, which notes how far the logprobs of its losses are from the rollout's."""

import torch
from trl import GRPOTrainer


class WatchedTrainer(GRPOTrainer):
    """`differences`: of each loss, float[trained tokens], in nats."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.differences = []

    def _get_per_token_logps_and_entropies(self, *given, **named):
        found = super()._get_per_token_logps_and_entropies(*given, **named)
        self._logps = found[0].detach()
        return found

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        self.differences.append((self._logps - inputs["sampling_per_token_logps"])[mask.bool()])
        return loss

    @property
    def greatest(self) -> float:
        """The greatest distance so far."""
        return float(torch.cat(self.differences).abs().max())
