"""The machine code of one chip, left alone in a CUDA library. Own reading of the format of `.nv_fatbin`.

A fat binary has containers, each with an entry for every chip; the driver takes that of its own. Here the entries of
one chip move to the front of their container, its length is cut to them, and the rest becomes zeros, which compress
away. The file keeps its length and its offsets. A container without such an entry is empty then: its kernels fail.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SECTION = ".nv_fatbin"
MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
"""Magic, version, bytes of this header, bytes of the entries."""

ENTRY = struct.Struct("<HHIQ")
"""Kind, version, bytes of the entry's header, bytes of its code."""

ARCHITECTURE_AT = 28
"""Of an entry: where its chip is, as a u32; 90 is Hopper."""

MACHINE_CODE = 2
"""An entry's kind; 1 is PTX, text for a compiler."""


class Span(NamedTuple):
    """Bytes [start, end) of a file."""

    start: int
    end: int


class Pruned(NamedTuple):
    """Containers, those that are empty now, bytes of code kept and dropped."""

    containers: int
    empty: int
    kept: int
    dropped: int


def section_of(data: bytes, name: str) -> Span | None:
    """Returns where a section of a 64-bit ELF file is, or None."""
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
    """Yields (where a container begins, where its entries are). Padding between containers is passed over."""
    at = span.start
    while at + CONTAINER.size <= span.end:
        magic, _, head, size = CONTAINER.unpack_from(data, at)
        if magic != MAGIC:
            at += 8
            continue
        yield at, Span(at + head, at + head + size)
        at += head + size


def entries_of(data: bytes, entries: Span) -> Iterator[tuple[Span, bool, int]]:
    """Yields (the entry with its header, whether it is machine code, its chip)."""
    at = entries.start
    while at < entries.end:
        kind, _, head, size = ENTRY.unpack_from(data, at)
        (chip,) = struct.unpack_from("<I", data, at + ARCHITECTURE_AT)
        yield Span(at, at + head + size), kind == MACHINE_CODE, chip
        at += head + size


def prune_span(data: bytearray, span: Span, architecture: int) -> Pruned:
    """Leaves the machine code of one chip in the containers of a span; the data keeps its length."""
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
    """Prunes a library in place. Raises ValueError if it has no code for GPUs."""
    data = bytearray(path.read_bytes())
    span = section_of(data, SECTION)
    if span is None:
        raise ValueError(f"{path.name}: no section {SECTION}")
    found = prune_span(data, span, architecture)
    path.write_bytes(data)
    return found
