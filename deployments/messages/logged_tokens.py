"""Tokens of a sample as a record of the token log, which one coordinator writes and the next one reads.

Invariant: a record that was cut, or in which a bit has changed, is no record. Called by `token_log`.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate
from typing import BinaryIO, NamedTuple

import numpy as np

from tailrace.deployments.messages.chunk import ChunkResult, SampleKey
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import PromptGroup, Segment
from tailrace.policies.protocol.events import ChunkEnd

MAGIC = b"tailrace tokens 2\n"
FRAME = struct.Struct("<II")  # bytes of the record, their CRC-32
HEAD = struct.Struct("<16sIIIIBHHH")  # group, index, start, tokens, weights version, stopped, bytes of three names


class LoggedTokens(NamedTuple):
    """Tokens of one segment of a sample: int32, and both logprobs float32. `group`: see `group_digest`.

    `stopped`: True if the last token is a stop token.
    """

    group: bytes
    index: int
    segment: Segment
    stopped: bool
    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray

    def part(self) -> ChunkResult:
        """Returns the tokens as a chunk of the sample. Its times and counts are not kept."""
        return ChunkResult(
            chunk_id="",
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            raw_logprobs=self.raw_logprobs,
            end=ChunkEnd.STOP if self.stopped else ChunkEnd.ABORTED,
            weights_version=self.segment.weights_version,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
            cached_tokens=0,
            computed_tokens=0,
        )


def group_digest(group: PromptGroup, first_key: SampleKey) -> bytes:
    """Returns 16 bytes that identify a prompt with its settings, and by the key of its first sample the seed and the
    step.
    """
    return blake2b(group.model_dump_json().encode() + first_key.to_bytes(8, "little"), digest_size=16).digest()


def packed(tokens: LoggedTokens) -> bytes:
    segment = tokens.segment
    names = [name.encode() for name in (segment.weights_digest, segment.adapter_digest, segment.replica_id)]
    head = HEAD.pack(
        tokens.group, tokens.index, segment.start, len(tokens.token_ids), segment.weights_version, tokens.stopped,
        *map(len, names),
    )  # fmt: skip
    columns = (tokens.token_ids, tokens.logprobs, tokens.raw_logprobs)
    payload = b"".join((head, *names, *(column.tobytes() for column in columns)))
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def unpacked(payload: bytes) -> LoggedTokens:
    """Unpacks a record without its frame; inverse of `packed`. Raises ValueError or struct.error."""
    group, index, start, count, version, stopped, *sizes = HEAD.unpack_from(payload)
    *starts, names_end = accumulate(sizes, initial=HEAD.size)
    if len(payload) != names_end + 12 * count:
        raise ValueError(f"{len(payload)} bytes for {count} tokens")
    digest, adapter, replica_id = (payload[at : at + size].decode() for at, size in zip(starts, sizes, strict=True))
    segment = Segment(
        weights_version=version,
        weights_digest=digest,
        adapter_digest=adapter,
        replica_id=replica_id,
        start=start,
        end=start + count,
    )
    columns = [
        np.frombuffer(payload, dtype, count, names_end + 4 * count * place)
        for place, dtype in enumerate(("<i4", "<f4", "<f4"))
    ]
    return LoggedTokens(group, index, segment, bool(stopped), *columns)


def read_records(file: BinaryIO) -> Iterator[LoggedTokens]:
    """Yields the records of an open file in order. Raises ValueError at the first one that is cut or damaged."""
    left = os.fstat(file.fileno()).st_size - len(MAGIC)
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it is no token log")
    while left:
        frame = file.read(FRAME.size)
        size, checksum = FRAME.unpack(frame) if len(frame) == FRAME.size else (left, 0)
        left -= FRAME.size + size
        payload = file.read(size) if left >= 0 else b""
        if left < 0 or zlib.crc32(payload) != checksum:
            raise ValueError("a record is cut or damaged; it and all after it are not used")
        try:
            yield unpacked(payload)
        except (ValueError, struct.error) as error:
            raise ValueError(f"not a record: {one_line(error)}") from error
