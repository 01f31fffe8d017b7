"""Names of KV: versions and models never share one."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tailrace.kvpool.keys import (
    ALL_BLOCKS,
    NAME_BYTES,
    PREFIX,
    block_name,
    cache_salt,
    fingerprint,
    is_block,
    version_of,
    version_pattern,
)

VERSIONS = st.integers(0, 2**32 - 1)
HASHES = st.binary(min_size=32, max_size=32)


def key(version: int, block_hash: bytes) -> str:
    return f"{PREFIX}-{'0' * 16}@model@tp_rank:0@{block_name(version, block_hash).hex()}"


@given(VERSIONS, VERSIONS, HASHES, HASHES)
def test_a_name_tells_version_and_block(one, other, ours, theirs):
    names = block_name(one, ours), block_name(other, theirs)
    assert len(names[0]) == len(names[1]) == NAME_BYTES
    assert (names[0] == names[1]) == ((one, ours) == (other, theirs))
    assert (cache_salt(one) == cache_salt(other)) == (one == other)
    assert cache_salt(one, "a") != cache_salt(one, "b")


@given(VERSIONS, VERSIONS, HASHES)
def test_a_key_is_found_by_its_version_alone(one, other, block_hash):
    assert is_block(key(one, block_hash)) and version_of(key(one, block_hash)) == one
    assert bool(re.search(version_pattern(other), key(one, block_hash))) == (one == other)


def test_salts_differ_by_version_content_and_adapter():
    salts = {cache_salt(*one) for one in ((1,), (2,), (1, "a"), (1, "b"), (1, "a", "x"), (1, "a", "y"), (1, "", "x"))}
    assert len(salts) == 7


def test_a_probe_is_no_block():
    assert not is_block(f"{PREFIX}-probe-1-0") and re.search(ALL_BLOCKS, key(0, bytes(32)))


def test_another_model_another_setting_another_fingerprint(tmp_path):
    folders = [tmp_path / name for name in ("one", "same", "middle", "longer")]
    for folder in folders:
        folder.mkdir()
    weights = bytes(range(256)) * 10_000
    changed = bytearray(weights)
    changed[len(weights) // 2 : len(weights) // 2 + 20_000] = bytes(20_000)
    for folder, content in zip(folders, (weights, weights, changed, weights + b"x"), strict=True):
        (folder / "model.safetensors").write_bytes(content)
    prints = [fingerprint(str(folder), "float32", 32) for folder in folders]
    assert prints[0] == prints[1] and len(set(prints)) == 3
    assert fingerprint(str(folders[0]), "float32", 16) != prints[0]
