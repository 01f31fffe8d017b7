"""Names of KV blocks. Invariant (law 6): KV written under one weights version is never read under another.

The version is part of a block's name in the pool and of the salt from which vLLM hashes a block. A name is the version
in four bytes, then the block's hash, which covers all tokens up to its end; keys spell it in hex digits. Called by the
engine, the connector and the coordinator.
"""

import re
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

PREFIX = "tailrace"
"""Prefix of every key of the pool."""

VERSION_BYTES = 4
NAME_BYTES = VERSION_BYTES + 32  # vLLM hashes blocks with SHA-256
SAMPLES, SAMPLE_BYTES = 256, 4096


def cache_salt(kv_version: int, digest: str = "", adapter: str = "") -> str:
    """Returns vLLM's per-request `cache_salt`: it enters the hash of the first block and so of every block.

    `digest`: names the content of the weights, so that KV of two contents under one version is never mixed up.
    `adapter`: the same for the adapter that the KV is made with; empty: none.
    """
    return f"weights-{kv_version}-{digest}" + (f"-adapter-{adapter}" if adapter else "")


def block_name(kv_version: int, block_hash: bytes) -> bytes:
    """Returns the name of a block: version (big endian) and hash. Raises OverflowError from version 2**32 on."""
    return kv_version.to_bytes(VERSION_BYTES, "big") + block_hash


ALL_BLOCKS = f"^{PREFIX}-[0-9a-f]{{16}}@"
"""Regular expression for the keys of all blocks, of any model; a replica's probes do not match."""


def is_block(key: str) -> bool:
    return re.match(ALL_BLOCKS, key) is not None


def version_of(key: str) -> int:
    """Returns the weights version in the key of a block, `PREFIX@NAME`."""
    return int(key.rpartition("@")[2][: 2 * VERSION_BYTES], 16)


def version_pattern(kv_version: int) -> str:
    """Returns a regular expression for the keys of one version."""
    return f"@{kv_version.to_bytes(VERSION_BYTES, 'big').hex()}[0-9a-f]+$"


def fingerprint(model: str, *settings: object) -> str:
    """Returns 16 hex digits that distinguish models, and settings that shape KV: models that share a version share no
    key.

    Reads the folder's weight files at SAMPLES evenly spaced places each: name and time say nothing across nodes, and
    reading all of a large model takes minutes, but a trained model differs from its start almost everywhere.
    """
    return digest_of_files(sorted(Path(model).glob("*.safetensors")), *settings)


def digest_of_files(paths: Iterable[Path], *settings: object) -> str:
    """Returns 16 hex digits of files, by their names, sizes and SAMPLES places each, and of settings."""
    digest = blake2b(repr(settings).encode(), digest_size=8, person=b"tailrace-model")
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for place in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * place // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
