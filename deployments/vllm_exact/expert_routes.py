"""Routed experts of each token, kept beside its KV (rollout routing replay, R3).

Each block of KV has one more piece: for each of its tokens, the experts that each layer chose. Invariant: whatever
moves a block's KV (prefix hits, later chunks, the pool) moves its routes, and what overwrites a token's KV, such as the
token after a rejected draft, overwrites its routes. vLLM's capturer reads the routers, as for its own
`enable_return_routed_experts`, which needs its second model runner and loses routes of KV that comes from a pool.
Called by the workers, if `vllm_args` has `enable_return_routed_experts: true`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tailrace.deployments.vllm_exact.engine_config import ROUTED_EXPERTS


def check_fits(vllm_config) -> None:
    """Raises ValueError, one line, if the model has no experts. Called before it is loaded."""
    if not vllm_config.model_config.is_moe:
        raise ValueError(f"vllm_args.{ROUTED_EXPERTS}: the model has no experts; remove it")


class ExpertRoutes(RoutedExpertsCapturer):
    """Routes of all tokens in the KV cache. `blocks`: uint8 or int16 [blocks + 1, numbers of a block], on the KV's
    device; the last one takes the rows of padding.
    """

    def __init__(self, vllm_config, model: torch.nn.Module, kv_cache_config):
        """Raises ValueError, one line, if blocks of the model's KV leave before their tokens do."""
        super().__init__(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config)
        group, *others = kv_cache_config.kv_cache_groups
        if others or not isinstance(group.kv_cache_spec, FullAttentionSpec):
            raise ValueError(f"vllm_args.{ROUTED_EXPERTS}: not all layers attend to the whole context; remove it")
        self._layer = group.layer_names[0]
        self._block_tokens = group.kv_cache_spec.block_size
        shape = kv_cache_config.num_blocks + 1, self._block_tokens * int(np.prod(self.shape_per_token))
        kind = torch.uint8 if self.output_dtype == torch.uint8 else torch.int16  # torch writes no rows of uint16
        self.blocks = torch.zeros(shape, dtype=kind, device=self.device_buffer.device)
        self._tokens = self.blocks.view(-1, *self.shape_per_token)
        self._padding = kv_cache_config.num_blocks * self._block_tokens
        bind_routed_experts_capturer(model, self)
        self._last = max(module.layer_id for module in model.modules() if isinstance(module, MoERunner))

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Records the experts of a step's tokens in one layer, int[tokens, experts]; after the last one all layers are
        written beside the tokens' KV. It is part of the forward pass, so of its CUDA graph too.
        """
        super().capture(layer_id, topk_ids)
        slots = get_forward_context().slot_mapping
        if layer_id == self._last and isinstance(slots, dict) and self._layer in slots:  # not in a profiling run
            slots = slots[self._layer]  # -1 for padding; `topk_ids` may be a shard of the step's tokens
            slots = torch.where(slots < 0, self._padding, slots)
            self._tokens[slots] = self.device_buffer[: len(slots)].to(self.blocks.dtype)

    def read(self, block_ids: Sequence[int] | torch.Tensor, start: int, end: int) -> np.ndarray:
        """Returns the routes of the positions from `start` to before `end` of a context in these blocks: uint8 or
        uint16 [positions, layers, experts].
        """
        positions = torch.arange(start, max(start, end), device=self.blocks.device)
        blocks = torch.as_tensor(block_ids, device=self.blocks.device).long()[positions // self._block_tokens]
        found = self._tokens[blocks * self._block_tokens + positions % self._block_tokens].cpu().numpy()
        return found.view(self.output_dtype_name)
