"""Copies blocks of a KV cache to pinned memory and back, in GB/s, by vLLM's copy of scattered blocks and by a gathered
copy.
"""

import torch

from tailrace.lab.benchmarks.gpu.measurements import Measurements

LAYERS, BLOCKS = 28, 2048
BLOCK_BYTES = 16 * 8 * 128 * 2 * 2
"""Bytes of a block: 16 tokens in a layer of Qwen3-1.7B, keys and values in bfloat16."""


def kv_copy(step: Measurements) -> None:
    layers, blocks = step.place.of((LAYERS, BLOCKS), (2, 32))
    for count in step.place.of((16, 128, 1024), (16,)):
        case = BlockCopies(step.place.device, layers, blocks, count)
        step.on_card(f"{count} blocks, scattered", case.scattered)
        step.tried(f"{count} blocks, gathered", case.gathered)


class BlockCopies:
    """`count` blocks of each layer, at random places."""

    def __init__(self, device: str, layers: int, blocks: int, count: int):
        bytes_of = {"dtype": torch.uint8, "device": device}
        self._caches = [torch.randint(0, 255, (blocks, BLOCK_BYTES), **bytes_of) for _ in range(layers)]
        self._host = torch.empty(layers, count, BLOCK_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
        chosen, places = torch.randperm(blocks)[:count], torch.arange(count)
        self._out, self._back = torch.stack([chosen, places], 1), torch.stack([places, chosen], 1)
        self._at = chosen.to(device)

    def scattered(self) -> dict:
        from vllm import _custom_ops as vllm_ops

        def out() -> None:
            for cache, host in zip(self._caches, self._host, strict=True):
                vllm_ops.swap_blocks(cache, host, BLOCK_BYTES, self._out)

        def back() -> None:
            for cache, host in zip(self._caches, self._host, strict=True):
                vllm_ops.swap_blocks(host, cache, BLOCK_BYTES, self._back)

        return self._measured(out, back)

    def gathered(self) -> dict:
        def out() -> None:
            for cache, host in zip(self._caches, self._host, strict=True):
                host.copy_(cache[self._at], non_blocking=True)

        def back() -> None:
            for cache, host in zip(self._caches, self._host, strict=True):
                cache[self._at] = host.to(cache.device, non_blocking=True)

        return self._measured(out, back)

    def _measured(self, out, back) -> dict:
        """Returns GB/s in both directions, and whether blocks that are zeroed on the device return from the host
        unchanged.
        """
        from tailrace.lab.benchmarks.gpu.timers import seconds_of

        before = [each.clone() for each in self._caches]
        size = self._host.numel()
        found = {"mib": size / 2**20}
        for name, run in (("to_host_gb_s", out), ("to_device_gb_s", back)):
            found[name] = round(1e-9 * size / seconds_of(run, 5), 2)
        for each in self._caches:
            each[self._at] = 0
        back()
        if self._at.is_cuda:
            torch.cuda.synchronize()
        same = all(torch.equal(one, other) for one, other in zip(before, self._caches, strict=True))
        return found | {"same": same}
