"""Distance of the trainer's logprobs from the rollout's, over the tokens of a step.

With the weights that made the samples it is the floating-point noise of two implementations; with older ones it shows
how far the policy has moved.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class LogprobMismatch:
    """Sums over tokens. `kl_sum`: sum of exp(d) - d - 1 with d = trainer - rollout, an estimate of KL(rollout, trainer)
    whose terms are not negative (Schulman's k3). `greatest`: largest |d|; NaN if one is.
    """

    tokens: int = 0
    kl_sum: float = 0.0
    greatest: float = 0.0

    def note(self, trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> None:
        """Adds tokens; all arguments have shape (samples, tokens); natural logarithms."""
        difference = (trainer - rollout)[mask.bool()].double()
        if difference.numel():
            self.tokens += difference.numel()
            self.kl_sum += float((difference.exp() - difference - 1).sum())
            self.greatest = float(np.maximum(self.greatest, float(difference.abs().max())))

    def add(self, other: "LogprobMismatch") -> None:
        """Adds the tokens of another object."""
        self.tokens += other.tokens
        self.kl_sum += other.kl_sum
        self.greatest = float(np.maximum(self.greatest, other.greatest))

    @property
    def kl(self) -> float:
        """Mean over the tokens, in nats."""
        return self.kl_sum / self.tokens if self.tokens else 0.0
