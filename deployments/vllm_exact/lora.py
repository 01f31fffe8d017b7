"""LoRA adapters in a worker: their layers on a CPU, and their loading. Used by the worker, which vLLM loads.

Invariant: a row of a batch gets the adapter of its request and no other, and an adapter is loaded whole or refused.
vLLM's wrappers of the embeddings and of the output layer are left out, since they break prompt logprobs (vLLM 0.32).
"""

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest

from tailrace.deployments.vllm_exact.patches import multiply_by_slot


class SlotWisePunica(PunicaWrapperCPU):
    """The products of a batch's rows with the adapters in their slots, slot by slot.

    vLLM 0.32's own class uses -1, the mark of a row without an adapter, as an index: such rows get the last slot's
    adapter. It also copies an adapter's matrix for each row.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._slots: list[tuple[int, torch.Tensor]] = []

    def update_metadata(self, *args, **kwargs) -> None:
        """Sets the slot of each row of the next step. Called by vLLM when it changes."""
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        self._slots = [(slot, (slots == slot).nonzero()[:, 0]) for slot in slots.unique().tolist() if slot >= 0]

    def add_shrink(self, y, x, lora_a_stacked, scale, **kwargs) -> None:
        """Sets y[i], f32[n, r], to scale * x @ A_i of each row's slot; x [n, in], A_i [slots, 1, r, in]."""
        x = x.view(-1, x.shape[-1])
        for out, stacked in zip(y, lora_a_stacked, strict=True):
            for slot, rows in self._slots:
                out[rows] = scale * (x[rows].to(out.dtype) @ stacked[slot, 0].to(out.dtype).T)

    def add_expand(self, y, x, lora_b_stacked, output_slices, offset_start=0, add_inputs=True, **kwargs) -> None:
        """Adds x[i] @ B_i of each row's slot to its columns of y; x[i] f32[n, r], B_i [slots, 1, out, r]."""
        y, first = y.view(-1, y.shape[-1]), offset_start
        for part, stacked, width in zip(x, lora_b_stacked, output_slices, strict=True):
            columns = y[:, first : first + width]
            for slot, rows in self._slots:
                delta = (part[rows] @ stacked[slot, 0].to(part.dtype).T).to(y.dtype)
                columns[rows] = columns[rows] + delta if add_inputs else delta
            first += width

    def add_lora_linear(self, y, x, *args, **kwargs) -> None:
        if self._slots:
            super().add_lora_linear(y, x, *args, **kwargs)


def prepare(model_runner) -> None:
    """Makes the runner wrap the model's linear layers alone, on a CPU by SlotWisePunica. Call it before the model is
    loaded.
    """
    multiply_by_slot(f"{__name__}.{SlotWisePunica.__name__}")
    wrap = model_runner.load_lora_model

    def load_lora_model(model, *args):
        for module in model.modules():
            if getattr(module, "embedding_modules", None):
                module.embedding_modules = {}
        return wrap(model, *args)

    model_runner.load_lora_model = load_lora_model


def hold(model_runner, number: int, folder: str) -> str | None:
    """Loads a folder's adapter under a number. Returns in one line why it must not be used, or None."""
    manager = model_runner.lora_manager
    try:
        manager.add_adapter(LoRARequest(folder, number, folder))
    except Exception as error:  # noqa: BLE001 - the edge to vLLM: a bad folder gives errors of any kind
        return f"adapter folder {folder}: {' '.join(str(error).split())}"
    layers = manager._adapter_manager
    left = layers.get_adapter(number).loras.keys() - layers.modules.keys()
    return f"adapter folder {folder}: the running model has no layer {min(left)}" if left else None


def keep_adapters(model_runner, load) -> None:
    """Runs `load`, which puts other weights into the model, and restores the adapters after it."""
    if model_runner.lora_config is None:
        load()
        return
    layers = model_runner.lora_manager._adapter_manager
    held = dict(layers.list_adapters())
    load()
    for lora in held.values():
        layers.add_adapter(lora)
