"""Compares vLLM's compiled operators, under the torch that is installed, with torch's own in float32.

Outputs are filled with NaN before, unless the operator works in place, so that an operator that writes nothing is seen.
Then products of models' shapes are measured: microseconds of torch's and of vLLM's batch-invariant ones, and whether a
row has the same bits in every batch.
"""

import torch
import torch.nn.functional as F

from tailrace.lab.benchmarks.gpu.measurements import NEEDS_CARD, Measurements

LIBRARIES = ("_C_stable_libtorch", "cumem_allocator", "vllm_flash_attn._vllm_fa3_C")
SHAPES = ((4096, 2048), (12_288, 2048), (2048, 6144), (151_936, 2048), (28_672, 4096), (4096, 14_336), (1536, 576))
"""Numbers of rows and columns of weights of Qwen3-1.7B, Llama-3.1-8B and SmolLM2-135M."""

ROWS = (1, 5, 17, 64, 256, 1024)
"""Numbers of rows of a product: 1, k + 1 for drafts of k = 4 and 16 tokens, and batches."""

EPSILON = 1e-5


def operators(step: Measurements) -> None:
    from vllm.platforms import current_platform

    for name in LIBRARIES:
        step.on_card(f"import {name}", lambda name=name: {"loaded": bool(__import__(f"vllm.{name}"))})
    current_platform.import_kernels()
    torch.manual_seed(0)
    case = OperatorCases(step.place.device)
    for run in (case.rms_norm, case.fused_add_rms_norm, case.silu_and_mul, case.rotary_embedding):
        step.tried(run.__name__, lambda run=run: {"distance": run()})
    step.on_card("reshape_and_cache_flash", lambda: {"distance": case.reshape_and_cache_flash()})
    paged = PagedCase(step.place.device)
    if step.place.card:
        step.tried("flash_attention_3", lambda: {"distance": paged.distance(paged.flash_attention_3())})
    else:
        step.say("flash_attention_3", skipped=NEEDS_CARD, reference=list(paged.wanted().shape))
    shapes = step.place.of(SHAPES, ((256, 128),))
    for rows, columns in shapes:
        step.tried(f"products {rows} x {columns}", lambda shape=(rows, columns): products(step, *shape))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the relative distance of two tensors, NaN if one has a NaN."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


class OperatorCases:
    """Operators with inputs in bfloat16. Each method returns the relative distance from float32."""

    def __init__(self, device: str):
        self._kind = {"device": device, "dtype": torch.bfloat16}
        self._x, self._more = (torch.randn(64, 2048, **self._kind) for _ in range(2))
        self._weight = torch.rand(2048, **self._kind)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, True) + EPSILON) * self._weight.float()

    def rms_norm(self) -> float:
        from vllm import _custom_ops as vllm_ops

        out = torch.full_like(self._x, float("nan"))
        vllm_ops.rms_norm(out, self._x, self._weight, EPSILON)
        return distance(out, self._normed(self._x))

    def fused_add_rms_norm(self) -> float:
        from vllm import _custom_ops as vllm_ops

        x, residual = self._x.clone(), self._more.clone()
        vllm_ops.fused_add_rms_norm(x, residual, self._weight, EPSILON)
        added = (self._x.float() + self._more.float()).to(torch.bfloat16)
        return distance(x, self._normed(added)) + distance(residual, added)

    def silu_and_mul(self) -> float:
        out = torch.full((64, 1024), float("nan"), **self._kind)
        torch.ops._C.silu_and_mul(out, self._x)
        return distance(out, F.silu(self._x[:, :1024].float()) * self._x[:, 1024:].float())

    def rotary_embedding(self) -> float:
        from vllm import _custom_ops as vllm_ops

        query, key = torch.randn(64, 1024, **self._kind), torch.randn(64, 256, **self._kind)
        places = torch.arange(64, device=self._kind["device"])
        speeds = 1.0 / 10_000 ** (torch.arange(0, 64, 2, device=places.device).float() / 64)
        angles = places[:, None].float() * speeds
        table = torch.cat([angles.cos(), angles.sin()], -1).to(torch.bfloat16)
        cos, sin = (part[:, None] for part in table.float().chunk(2, -1))
        one, two = query.view(64, -1, 64).float().chunk(2, -1)
        wanted = torch.cat([one * cos - two * sin, two * cos + one * sin], -1).view(64, -1)
        vllm_ops.rotary_embedding(places, query, key, 64, table, True)
        return distance(query, wanted)

    def reshape_and_cache_flash(self) -> float:
        from vllm import _custom_ops as vllm_ops

        caches = [torch.zeros(8, 16, 4, 64, **self._kind) for _ in range(2)]
        new = [torch.randn(20, 4, 64, **self._kind) for _ in range(2)]
        device = self._kind["device"]
        slots, one = torch.randperm(128, device=device)[:20], torch.ones(1, device=device)
        vllm_ops.reshape_and_cache_flash(*new, *caches, slots, "auto", one, one)
        pairs = zip(caches, new, strict=True)
        return sum(distance(cache.view(128, 4, 64)[slots], each) for cache, each in pairs)


class PagedCase:
    """Three rows over paged KV: one that decodes, a whole prompt, and one that verifies four draft tokens."""

    HEADS, KV_HEADS, WIDTH, BLOCKS, BLOCK = 9, 3, 64, 64, 16
    LENGTHS, NEW = (100, 33, 17), (1, 33, 5)

    def __init__(self, device: str):
        kind = {"device": device, "dtype": torch.bfloat16}
        self._device = device
        shape = self.BLOCKS, self.BLOCK, self.KV_HEADS, self.WIDTH
        self._keys, self._values = (torch.randn(shape, **kind) for _ in range(2))
        self._query = torch.randn(sum(self.NEW), self.HEADS, self.WIDTH, **kind)
        self._blocks = torch.randperm(self.BLOCKS, device=device).int()[:21].view(3, 7)

    def flash_attention_3(self) -> torch.Tensor:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        ints = {"device": self._device, "dtype": torch.int32}
        starts = torch.tensor([0, *torch.tensor(self.NEW).cumsum(0).tolist()], **ints)
        return flash_attn_varlen_func(
            self._query, self._keys, self._values, max_seqlen_q=max(self.NEW), cu_seqlens_q=starts,
            max_seqlen_k=max(self.LENGTHS), causal=True, block_table=self._blocks,
            seqused_k=torch.tensor(self.LENGTHS, **ints), fa_version=3, num_splits=1,
        )  # fmt: skip

    def wanted(self) -> torch.Tensor:
        """Returns torch's outputs in float32, in the query's shape: [tokens, heads, width]."""
        found, at = [], 0
        for i, (length, new) in enumerate(zip(self.LENGTHS, self.NEW, strict=True)):
            keys, values = (self._rows(cache, i, length) for cache in (self._keys, self._values))
            seen = torch.ones(new, length, device=self._device, dtype=torch.bool).tril(length - new)
            query = self._query[at : at + new].float().transpose(0, 1)
            found.append(F.scaled_dot_product_attention(query, keys, values, attn_mask=seen).transpose(0, 1))
            at += new
        return torch.cat(found)

    def _rows(self, cache: torch.Tensor, row: int, length: int) -> torch.Tensor:
        rows = cache[self._blocks[row].long()].reshape(-1, self.KV_HEADS, self.WIDTH)[:length].float()
        return rows.repeat_interleave(self.HEADS // self.KV_HEADS, 1).transpose(0, 1)

    def distance(self, found: torch.Tensor) -> float:
        """Returns the largest of the three rows' distances from `wanted`."""
        pairs = zip(found.split(self.NEW), self.wanted().split(self.NEW), strict=True)
        return max(distance(one, other) for one, other in pairs)


def products(step: Measurements, rows: int, columns: int) -> dict:
    """Returns microseconds of a product by the rows of the batch, and the largest difference from rows computed alone:
    for torch, and on a GPU for vLLM's batch-invariant product.
    """
    from tailrace.lab.benchmarks.gpu.timers import microseconds, seconds_of

    kind = {"device": step.place.device, "dtype": torch.bfloat16}
    weight, batch = torch.randn(rows, columns, **kind) / columns**0.5, torch.randn(max(ROWS), columns, **kind)
    ways = {"torch": lambda x: F.linear(x, weight)}
    if step.place.card:  # vLLM's batch-invariant product is a Triton kernel
        from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

        ways["invariant"] = lambda x: linear_batch_invariant(x, weight)
    found: dict = {}
    for name, product in ways.items():
        whole = product(batch)
        found[f"{name}_us"] = {m: microseconds(seconds_of(lambda x=batch[:m], product=product: product(x)))
                               for m in step.place.of(ROWS, (1, 5))}  # fmt: skip
        alone = torch.cat([product(batch[i : i + 1]) for i in range(17)])
        found[f"{name}_unlike"] = {m: unlike(product(batch[:m])[:17], alone[:m]) for m in (5, 17, 64, 256)}
        found[f"{name}_unlike"][max(ROWS)] = unlike(whole[:17], alone)
    return found


def unlike(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the largest absolute difference of two tensors of one dtype; 0.0 says equal values."""
    return float((found.float() - wanted.float()).abs().max())
