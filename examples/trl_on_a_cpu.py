"""Two patches with which TRL 1.16's asynchronous trainer runs on a CPU. For trying out; a GPU needs neither.

The trainer asks torch.cuda for the device's name, to log the share of its peak; and its packed attention loads kernels
of FlashAttention 3. The second is computed by torch here, one piece after another.
"""

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


class TorchAttention:
    """The one function that the trainer uses of FlashAttention."""

    @staticmethod
    def flash_attn_varlen_func(query, key, value, starts, key_starts, max_q, max_k, softmax_scale, causal, window_size):
        """Shapes [tokens, heads, channels]; piece i of the queries is the end of piece i of the keys."""
        if not causal or window_size != (-1, -1):
            raise NotImplementedError("causal attention without a window alone")
        pieces = []
        for first, end, key_first, key_end in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
            q, k, v = query[first:end], key[key_first:key_end], value[key_first:key_end]
            seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
            made = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            pieces.append(made[0].transpose(0, 1))
        return torch.cat(pieces)


def patch(replace=setattr) -> None:
    """`replace`: sets an attribute of a module; pytest's `monkeypatch.setattr` undoes it."""
    replace(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None)
    replace(packing, "_flash_attn", lambda: TorchAttention)
