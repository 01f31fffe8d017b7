"""Removes the machine code of all chips but one from a CUDA library. The parser of `.nv_fatbin` is our own.

A fat binary has containers, each with an entry for every chip; the driver loads the entry of its own chip. Here the
entries of one chip move to the front of their container. The container's length is cut to these entries, and the rest
becomes zeros, which compress well. The file keeps its length and its offsets. A container without an entry of the chip
is then empty, and its kernels fail.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECTION = ".nv_fatbin"
MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
"""Header of a container: magic, version, bytes of this header, bytes of the entries."""

ENTRY = struct.Struct("<HHIQ")
"""First fields of an entry's header: kind, version, bytes of the header, bytes of the code."""

ARCHITECTURE_AT = 28
"""Offset of the chip's number in an entry, a u32; 90 is Hopper."""

MACHINE_CODE = 2
"""Kind of an entry with machine code; 1 is PTX, text for a compiler."""


class Span(NamedTuple):
    """Bytes [start, end) of a file."""

    start: int
    end: int


class Pruned(NamedTuple):
    """Number of containers, number of those that are empty now, bytes of entries kept and dropped."""

    containers: int
    empty: int
    kept: int
    dropped: int


def section_of(data: bytes, name: str) -> Span | None:
    """Returns the bytes of a 64-bit ELF file in which a section is, or None. Raises ValueError for any other file."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    texts = headers[names][4]
    for header in headers:
        start = texts + header[0]
        if data[start : data.index(b"\0", start)].decode() == name:
            return Span(header[4], header[4] + header[5])
    return None


def containers_of(data: bytes, span: Span) -> Iterator[tuple[int, Span]]:
    """Yields for each container its offset and the span of its entries. Skips padding between containers."""
    at = span.start
    while at + CONTAINER.size <= span.end:
        magic, _, head, size = CONTAINER.unpack_from(data, at)
        if magic != MAGIC:
            at += 8
            continue
        yield at, Span(at + head, at + head + size)
        at += head + size


def entries_of(data: bytes, entries: Span) -> Iterator[tuple[Span, bool, int]]:
    """Yields for each entry its span with the header, whether it is machine code, and its chip."""
    at = entries.start
    while at < entries.end:
        kind, _, head, size = ENTRY.unpack_from(data, at)
        (chip,) = struct.unpack_from("<I", data, at + ARCHITECTURE_AT)
        yield Span(at, at + head + size), kind == MACHINE_CODE, chip
        at += head + size


def prune_span(data: bytearray, span: Span, architecture: int) -> Pruned:
    """Removes from the containers of a span all but the machine code of one chip. The data keeps its length."""
    whole, count, empty, kept, dropped = bytes(data), 0, 0, 0, 0
    for at, entries in containers_of(whole, span):
        mine = [one for one, code, chip in entries_of(whole, entries) if code and chip == architecture]
        chosen = b"".join(whole[one.start : one.end] for one in mine)
        data[entries.start : entries.end] = chosen + bytes(entries.end - entries.start - len(chosen))
        struct.pack_into("<Q", data, at + 8, len(chosen))
        count, empty = count + 1, empty + (not chosen)
        kept, dropped = kept + len(chosen), dropped + entries.end - entries.start - len(chosen)
    return Pruned(count, empty, kept, dropped)


def prune(path: Path, architecture: int) -> Pruned:
    """Prunes a library in place. Raises ValueError if it is no 64-bit ELF file, or has no code for GPUs."""
    data = bytearray(path.read_bytes())
    span = section_of(data, SECTION)
    if span is None:
        raise ValueError(f"{path.name}: no section {SECTION}")
    found = prune_span(data, span, architecture)
    path.write_bytes(data)
    return found
