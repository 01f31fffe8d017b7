"""New weights for a running model: checked against the tensors it was started with, then loaded in place.

A source of weights is a folder, or `memory:...`, which names a slot of this node (deployments.staging).
Invariant: nothing is changed before the whole folder is known to hold the same tensors in the same shapes.
During loading the model is neither the old one nor the new one, so a failure then ends the engine.
Safetensors only: other formats can run code while they are read. Called by the worker, on the engine's thread.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.staging.slots import is_memory, memory_source, slot_of
from tailrace.kvpool.keys import digest_of_files

FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types that vLLM casts into one another on loading; any other change of type is a different format of weights."""

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Shape and type by name; the type is safetensors' own name (`float` for each of FLOATS)."""


def called(source: str) -> str:
    """Returns the words for a source of weights in messages."""
    return f"weights {source}" if is_memory(source) else f"weights folder {source}"


def tensors_of(folder: str) -> Tensors:
    """Returns the tensors in the safetensors of a Hugging Face folder, from their headers.

    The headers also show a cut-off file. Raises ValueError, one line that names the folder.
    """
    found = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    part = file.get_slice(name)
                    kind = part.get_dtype()
                    if name in found:
                        raise ValueError(f"{called(folder)}: {path.name} has {name}, which another file has too")
                    found[name] = tuple(part.get_shape()), "float" if kind in FLOATS else kind
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{called(folder)}: {path.name} cannot be read: {error}") from error
    return found


def predicts_further(name: str, layers: int) -> bool:
    """Returns whether a tensor belongs to layers for multi-token prediction, of a model of this many other layers.

    vLLM's model leaves them to a drafter. Trainers may not have them: transformers leaves them out of its models.
    """
    layer = re.match(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.", name)  # none of a vision tower
    return re.search(r"(^|\.)mtp", name) is not None or (layer is not None and int(layer[1]) >= layers)


def refusal(folder: str, loaded: Tensors, layers: int) -> str | None:
    """Returns in one line why the folder's weights cannot replace `loaded`, or None if they can. `layers`: of the
    model; layers for multi-token prediction may be missing.
    """
    try:
        found = tensors_of(folder)
    except ValueError as error:
        return str(error)
    for name in sorted(loaded.keys() | found.keys()):
        if name not in found and predicts_further(name, layers):
            continue
        if name not in found:
            return f"{called(folder)}: no tensor {name}, which the running model has"
        if name not in loaded:
            return f"{called(folder)}: the running model has no tensor {name}"
        if found[name] != loaded[name]:
            (shape, kind), (old_shape, old_kind) = found[name], loaded[name]
            return f"{called(folder)}: {name} is {kind} {shape}, in the running model {old_kind} {old_shape}"
    return None


def weights_digest(folder: str) -> str:
    """Returns 16 hex digits that name the content of a folder's safetensors. Raises ValueError, one line.

    Every file is read at evenly spaced places (milliseconds): two states of training differ almost everywhere. The name
    of weights in memory holds their digest, from a checksum of every byte.
    """
    if is_memory(folder):
        return memory_source(folder).digest
    try:
        return digest_of_files(_files(folder))
    except OSError as error:
        raise ValueError(f"{called(folder)}: cannot be read: {error}") from error


def checked_digest(folder: str) -> str:
    """Returns the folder's digest once every value in it is a finite number. Raises ValueError, one line.

    Reads the whole folder, which the load that follows then finds in the page cache.
    """
    digest = weights_digest(folder)
    try:
        for name, tensor in read_tensors(folder):
            if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
                raise ValueError(f"{called(folder)}: {name} has a value that is not a finite number")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{called(folder)}: cannot be read: {one_line(error)}") from error
    if weights_digest(folder) != digest:
        raise ValueError(f"{called(folder)}: it was written to meanwhile; update again once it is complete")
    return digest


def read_tensors(folder: str) -> Iterator[tuple[str, object]]:
    """Yields a folder's tensors by name. Raises ValueError, one line, if it cannot be opened."""
    yield from _tensors(_opened(folder))


def _is_finite(tensor) -> bool:
    """Returns whether all values of a float tensor are finite. One pass: the extremes propagate NaN."""
    extremes = tensor.float() if tensor.element_size() == 1 else tensor
    low, high = extremes.aminmax()
    return bool(low.isfinite() and high.isfinite())


def load_in_place(model_runner, folder: str) -> None:
    """Loads the folder's weights into the running model, layer by layer: one layer at a time exists twice.

    Raises ValueError, one line, if the files are gone; nothing has changed. Raises RuntimeError when it fails half-way;
    the model must then not be used any more.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    # It warns of layers with nothing to load: rotary embeddings, and an output layer tied to the input's.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    files = _opened(folder)  # a slot may be replaced meanwhile; an open file stays as it was
    try:
        model_runner.reload_weights(weights_iterator=_tensors(files))
        for layer in model_runner.get_model().modules():
            # A CPU multiplies by a repacked copy of a weight. vLLM 0.32 repacks only the layers with loaded tensors.
            # An output layer that shares the input embedding's weight would keep the copy of the old one.
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)
            # Experts on a CPU are repacked in place, at the first load alone: later ones would be taken for repacked.
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if isinstance(experts := getattr(kernel, "fused_experts", None), CPUUnquantizedExperts):
                experts.process_weights_after_loading(layer)
    except Exception as error:  # after any error the model is half loaded and the engine cannot continue
        raise RuntimeError(f"{called(folder)}: loading broke off half-way: {error!r}") from error


def load_drafter(vllm_config, model, folder: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Loads the weights of vLLM's own drafter from the wanted tensors of a folder; its other layers stay as they are.
    Raises RuntimeError when it fails half-way.
    """
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    files, plain = _opened(folder), getattr(model, "unwrap", lambda: model)()  # from its CUDA graphs
    tensors = ((name, tensor) for name, tensor in _tensors(files) if wanted(name))
    try:
        reload_weights(vllm_config, plain, tensors, weights_path=None, is_checkpoint_format=True)
    except Exception as error:  # after any error the drafter is half loaded
        raise RuntimeError(f"{called(folder)}: loading the drafter broke off half-way: {error!r}") from error


def _files(folder: str) -> list[Path]:
    """Returns the safetensors to load: those in the index file, if there is one (a folder may hold a second copy)."""
    if is_memory(folder):
        if (slot := slot_of(memory_source(folder))) is None:
            raise ValueError(f"{called(folder)}: no slot of this node holds them")
        return sorted(slot.glob("*.safetensors"))
    index = Path(folder) / "model.safetensors.index.json"
    try:
        is_there = index.parent.is_dir()
    except OSError as error:  # it may not be looked at, or its name is too long
        raise ValueError(f"{called(folder)}: cannot be read: {one_line(error)}") from error
    if not is_there:
        raise ValueError(f"{called(folder)}: no such folder on this machine")
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{called(folder)}: {index.name} cannot be read: {error!r}") from error
    for name in names or ():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{called(folder)}: {index.name} names {name!r}, which is no file of this folder")
    paths = sorted(index.parent.glob("*.safetensors") if names is None else (index.parent / name for name in names))
    if not paths:
        raise ValueError(f"{called(folder)}: no *.safetensors")
    return paths


def _opened(folder: str) -> list:
    try:
        return [safe_open(path, framework="pt").__enter__() for path in _files(folder)]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{called(folder)}: cannot be read: {one_line(error)}") from error


def _tensors(files: list) -> Iterator[tuple[str, object]]:
    """Yields tensors by name, each a view of its mapped file until vLLM has copied it."""
    for file in files:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)
