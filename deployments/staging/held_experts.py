"""Weights of experts, read back from the parameters in which vLLM joins those of a layer.

A CPU multiplies by a repacked copy, which is all that is kept. Repacking moves values and changes none: where each one
goes is read from a repacked matrix of numbers. Checked against vLLM 0.32.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

PLAIN = {"TritonExperts"}
"""vLLM's kernels, by class, that leave the parameters as they are loaded."""

BYTE = 8


class HeldExpert(NamedTuple):
    """One of the matrices of an expert: its layer in vLLM, the parameter that it is a part of, and which."""

    layer: torch.nn.Module
    parameter: str
    number: int
    shard: str

    def values(self, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the values of a weight or bias that is saved in this shape. Raises ValueError, one line."""
        whole = getattr(self.layer, self.parameter + kind).detach()[self.number]
        whole = unpacked_expert(self.layer, whole) if kind == "weight" else whole
        first = len(whole) // 2 if self.shard == "w3" else 0  # "w1" and "w3" are the halves of one parameter
        return whole[(slice(first, first + shape[0]), *(slice(size) for size in shape[1:]))]  # without vLLM's padding


def experts_of(path: str, layer: torch.nn.Module) -> Iterator[tuple[str, HeldExpert]]:
    """Yields the experts of a layer by the beginning of their saved names, to which `weight` or `bias` is added."""
    if not hasattr(layer, "get_expert_mapping"):
        return
    before = path.rpartition(".experts")[0]
    for parameter, saved, number, shard in layer.get_expert_mapping():
        yield f"{before}.{saved}", HeldExpert(layer, parameter.rpartition(".")[2], number, shard)


def unpacked_expert(layer: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Returns the matrix [outputs, inputs] of an expert as it was loaded. Raises ValueError for an unknown kernel."""
    method = layer.quant_method
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", method)
    if type(kernel).__name__ in PLAIN:
        return values
    if (isa := getattr(kernel, "isa", None)) is None or getattr(kernel, "_use_zentorch", False):
        raise ValueError(f"the experts of {type(kernel).__name__} cannot be read back")
    return values.reshape(-1)[places(isa, values.dtype, tuple(values.shape))].reshape(values.shape)


@lru_cache(2)
def places(isa: str, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    """Returns where each value of a matrix is once it is repacked, int64[outputs * inputs]. `isa`: as vLLM names it."""
    numbers = torch.arange(shape[0] * shape[1])
    packed = torch.zeros_like(numbers)
    for shift in range(0, len(numbers).bit_length(), BYTE):  # of which a short type holds every value
        part = (numbers >> shift) % (1 << BYTE)
        packed += repacked(part.to(dtype).reshape(1, *shape), isa).reshape(-1).long() << shift
    found = torch.empty_like(numbers)
    found[packed] = numbers
    return found


def repacked(weights: torch.Tensor, isa: str) -> torch.Tensor:
    """Returns weights [experts, outputs, inputs] as a CPU multiplies by them."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(weights, isa)
