"""The header of a safetensors file: read without loading a tensor, and written after the data.

The format: eight bytes with the header's length, the header as JSON, and the data; spaces may end the header. Our
headers have a fixed size, so that data can come first and checksums later. Names of types are those of the format.
"""

import json
from pathlib import Path

HEADER_BYTES = 1 << 20
"""Size of the header in our files, length included: room for about 5,000 tensors; further ones go into another file."""

TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1,
}  # fmt: skip

MAX_HEADER_BYTES = 100_000_000
"""Maximum header size of the format."""


def read_header(path: Path) -> tuple[dict, int]:
    """Returns the header and the place where the data begins. Raises OSError, or ValueError for another format."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} has no header: it was not written to its end")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} has a header that is no object")
    return header, 8 + length


def header_block(header: dict) -> bytes:
    """Returns HEADER_BYTES that begin a file. Raises ValueError if the header is too long."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > HEADER_BYTES - 8:
        raise ValueError(f"a header of {len(text)} bytes, for which {HEADER_BYTES - 8} are left")
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)
