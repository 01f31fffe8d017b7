"""vLLM's own draft models draw with the noise of their requests' tokens, in its second model runner.

The runner's speculators may draw inside of CUDA graphs, so keys and parameters of all requests stay at fixed places on
the device, by the runner's numbers. A draft draws as if no rule held. Why the noise is shared: shared_noise.py.
Source: `DraftModelSpeculator.sample_draft`, vLLM 0.32, `v1/worker/gpu/spec_decode/speculator.py`. Called by
sampler_v2.py.
"""

import numpy as np
import torch

from tailrace.deployments.vllm_exact.fused import kernel
from tailrace.deployments.vllm_exact.fused.parameters import RowParameters, parameters_of, to_device
from tailrace.deployments.vllm_exact.sampling_columns import WARM_UP, columns_of

NO_FORCED = np.array([-1], np.int32)


class DraftNoise:
    """Of `count` requests over a vocabulary of this size; until `set`, each is one of vLLM's own, of its warm-up."""

    def __init__(self, count: int, vocabulary: int, device: torch.device):
        self._vocabulary, self._device = vocabulary, device
        self._keys, *held = (each.expand(count, *each.shape[1:]).clone() for each in self._rows(WARM_UP))
        self._parameters = RowParameters(*held)

    def set(self, number: int, args: dict) -> None:
        """Sets the parameters of the request with this number. `args`: those of `sampler.extra_args`."""
        for held, row in zip((self._keys, *self._parameters), self._rows(args), strict=True):
            held[number].copy_(row[0], non_blocking=True)

    def _rows(self, args: dict) -> tuple[torch.Tensor, ...]:
        columns = columns_of([args])
        keys = to_device(columns.pop("key").view(np.int64), self._device)
        return keys, *parameters_of(self._vocabulary, **columns, forced=NO_FORCED).to(self._device)

    def share_with(self, speculator) -> None:
        """Replaces the drawing of a speculator."""

        def sample(hidden_states, sample_src_positions, idx_mapping, _temperature, _seeds, draft_step, *_, **given):
            logits = speculator.compute_draft_logits(hidden_states, given.get("spec_step_idx", 0))
            tokens = self.draw(logits, idx_mapping.long(), sample_src_positions.long() + 1)
            speculator._maybe_predict_acceptance(logits, idx_mapping, draft_step)
            return tokens.long()

        speculator.sample_draft = sample

    def draw(self, logits: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the tokens i32[n] of requests `numbers` i64[n] at these positions i64[n], by their logits [n, V]."""
        parameters = RowParameters(*(each[numbers] for each in self._parameters))
        return kernel.draw(logits, self._keys[numbers], positions, parameters)[0]
