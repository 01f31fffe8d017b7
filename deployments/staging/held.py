"""The weights that an engine computes with, read back from its model under the names of a saved folder.

A CPU multiplies by repacked copies, which cannot be read directly: their product with the identity gives the values.
The values are exact, except for the sign of zeros. Invariant: a tensor that cannot be read is an error, and never left
out. Called by the worker.
"""

from collections.abc import Iterator, Mapping

import torch

from tailrace.deployments.staging.checksums import checksum
from tailrace.deployments.staging.held_experts import experts_of
from tailrace.deployments.staging.stage import as_bytes

ROWS = 256
"""Number of rows of the identity in one product, which bounds its memory."""

Shapes = Mapping[str, tuple[int, ...]]


class HeldWeights:
    """`model`: vLLM's model, whole (no tensor parallelism). `shapes`: shapes of the saved tensors, by name."""

    def __init__(self, model: torch.nn.Module, shapes: Shapes):
        modules = model.named_modules()
        self._modules = {name: getattr(module, "base_layer", module) for name, module in modules}  # below LoRA's
        self._experts = {name: one for path, module in self._modules.items() for name, one in experts_of(path, module)}
        self._shapes = shapes
        self._merged = {
            part: (whole, parts)
            for whole, parts in getattr(model, "packed_modules_mapping", {}).items()
            for part in parts
        }

    def module_of(self, name: str) -> tuple[torch.nn.Module, str, int]:
        """Returns the module of a saved tensor, the name of its parameter, and its first row there: vLLM joins some
        tensors.

        Raises ValueError, one line.
        """
        path, _, kind = name.rpartition(".")
        if path in self._modules:
            return self._modules[path], kind, 0
        parent, _, last = path.rpartition(".")
        whole, parts = self._merged.get(last, ("", ()))
        if (module := self._modules.get(f"{parent}.{whole}")) is None:
            raise ValueError(f"tensor {name} is not found in the running model: vLLM has it under another name")
        before = parts[: parts.index(last)]
        return module, kind, sum(self._shapes[f"{parent}.{part}.{kind}"][0] for part in before)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the saved names with the values held, on the host. Raises ValueError, one line."""
        for name, shape in sorted(self._shapes.items()):
            found = self._values(name, shape)
            if tuple(found.shape) != shape:
                raise ValueError(f"tensor {name} is {tuple(found.shape)} in the running model, saved as {shape}")
            yield name, found.cpu().contiguous()

    def _values(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        path, _, kind = name.rpartition(".")
        if (expert := self._experts.get(f"{path}.")) is not None:
            return expert.values(kind, shape)
        module, kind, first = self.module_of(name)
        values = values_of(module, kind)
        return values[first : first + shape[0]] if values.ndim else values

    def checksums(self) -> dict[str, str]:
        """Returns checksums by name, see `checksums.checksum`; zeros count as positive."""
        return {name: checksum_of(name, values) for name, values in self}

    def unlike(self, saved: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
        """Returns the names of tensors whose values differ from the saved ones in the model's type, packed copies
        included.
        """
        wanted = dict(saved)
        found = [name for name, values in self if not torch.equal(values, wanted[name].to(values.dtype))]
        return found + self._stale_copies()

    def _stale_copies(self) -> list[str]:
        """Returns the modules whose weight has a packed copy with other values; output layers that share the input's
        have one.
        """
        copies = [(n, m) for n, m in self._modules.items() if is_packed(m) and m.weight.numel()]
        return [f"{name} (packed)" for name, module in copies if not torch.equal(unpacked(module), module.weight)]


def quantized_checksums(model: torch.nn.Module) -> dict[str, str]:
    """Returns checksums of a quantized model's tensors, scales too, under the names that they have in vLLM's model."""
    held = {
        f"{path}.{kind}": values_of(module, kind).cpu()
        for path, module in model.named_modules()
        for kind, parameter in module.named_parameters(recurse=False)
        if not parameter.is_meta
    }
    return {name: checksum(name, *as_bytes(name, values)) for name, values in sorted(held.items())}


def is_packed(module: torch.nn.Module) -> bool:
    """Returns whether vLLM's CPU layers multiply by a copy of this module's weight; a LoRA layer around it does not
    count.
    """
    return vars(module).get("cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear


def values_of(module: torch.nn.Module, kind: str) -> torch.Tensor:
    """Returns the values of a parameter, those of the packed copy if vLLM keeps no other."""
    values = getattr(module, kind).detach()
    return values if values.numel() or kind != "weight" or not is_packed(module) else unpacked(module)


def unpacked(module: torch.nn.Module) -> torch.Tensor:
    """Returns the matrix [outputs, inputs] that a module multiplies by, from its product with the identity."""
    inputs = module.weight.shape[1] if module.weight.numel() else module.input_size
    rows = (torch.eye(min(ROWS, inputs - start), inputs, dtype=module.weight.dtype).roll(start, 1)
            for start in range(0, inputs, ROWS))  # fmt: skip
    return torch.cat([module.cpu_linear(some, module.weight, None) for some in rows]).T


def checksum_of(name: str, values: torch.Tensor) -> str:
    """Returns the checksum of a tensor on the host; zeros count as positive."""
    return checksum(name, *as_bytes(name, values + 0.0 if values.is_floating_point() else values))
