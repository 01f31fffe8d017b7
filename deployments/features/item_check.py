"""Strict check of an encoded item before vLLM's own decoder reads it.

Invariant: after the check the decoder creates only tensors. By itself it unpickles two kinds of content if an
environment variable allows it, and reads any attribute of torch and of vLLM's factories by its name. Source of the
format: `MsgpackEncoder`, vLLM 0.32, `v1/serial_utils.py`. Called by the coordinator and by the engine, for every item.
"""

from math import prod
from typing import Any

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, for each type that is accepted."""

RAW_TENSOR = 3
"""The only extension that is accepted. vLLM's 1 and 2 are pickles."""

FIELD_KEYS = {
    "batched": {"keep_on_cpu"},
    "flat": {"keep_on_cpu", "slices", "dim"},
    "shared": {"keep_on_cpu", "batch_size"},
}
"""How items of a batch are put together, and the arguments of each way."""

EMBEDDINGS = "_embeds"
"""Suffix of the names of fields that bypass the encoders of vLLM's models. Nothing would check their width."""

MAX_DEPTH = 4
"""Maximum depth of nested lists; a video of several sizes has two levels."""


def item_refusal(content: bytes) -> str | None:
    """Returns in a few words why this is not an encoded item, or None if it is one."""
    import msgspec  # it comes with vLLM, and drivers have none

    try:
        fields = msgspec.msgpack.decode(content, ext_hook=_extension)
        if not isinstance(fields, dict) or not fields:
            raise ValueError("it has no fields")
        for name, value in fields.items():
            if not isinstance(name, str) or not isinstance(value, dict) or value.keys() != {"data", "field"}:
                raise ValueError(f"field {name!r} has not the form of vLLM's encoder")
            if name.endswith(EMBEDDINGS):
                raise ValueError(f"field {name!r}: give the inputs of the encoder, not its embeddings")
            _check_data(value["data"], 0)
            _check_field(value["field"])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return str(error)
    return None


def _extension(code: int, data: memoryview) -> memoryview:
    if code != RAW_TENSOR:
        raise ValueError(f"extension {code}: tensors alone are taken, nothing pickled")
    return data


def _check_data(data: Any, depth: int) -> None:
    if isinstance(data, int | float):
        return
    if not isinstance(data, list) or not data or depth > MAX_DEPTH:
        raise ValueError("its data are neither numbers nor tensors")
    if not isinstance(data[0], str):
        for each in data:
            _check_data(each, depth + 1)
        return
    if len(data) != 3 or data[0] not in ITEM_BYTES or not isinstance(data[2], memoryview):
        raise ValueError(f"a tensor is [one of {', '.join(ITEM_BYTES)}; its shape; its bytes]")
    kind, shape, raw = data
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError("a tensor's shape is a list of numbers")
    if prod(shape) * ITEM_BYTES[kind] != raw.nbytes:
        raise ValueError(f"a tensor of {kind} and shape {shape} has {raw.nbytes} bytes")


def _check_field(field: Any) -> None:
    if not isinstance(field, list) or len(field) != 2 or field[0] not in FIELD_KEYS or not isinstance(field[1], dict):
        raise ValueError(f"a field is one of {', '.join(FIELD_KEYS)}, with its arguments")
    kind, given = field
    if not given.keys() <= FIELD_KEYS[kind]:
        raise ValueError(f"field {kind} has {', '.join(sorted(FIELD_KEYS[kind]))}, not {', '.join(map(str, given))}")
    for name, value in given.items():
        if name == "slices":
            _check_slices(value, 0)
        elif not isinstance(value, int):
            raise ValueError(f"field {kind}: {name} is a number")


def _check_slices(slices: Any, depth: int) -> None:
    if not isinstance(slices, list) or not slices or depth > 2:
        raise ValueError("field flat: slices are lists of three numbers")
    if isinstance(slices[0], list):
        for each in slices:
            _check_slices(each, depth + 1)
    elif len(slices) != 3 or not all(value is None or isinstance(value, int) for value in slices):
        raise ValueError("field flat: slices are lists of three numbers")
