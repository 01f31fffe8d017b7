"""Copies of staged weights in the KV pool, for nodes where they were not staged.

A tensor is one value under `weights/VERSION/NAME`, and so is each file's header under its file's name. Invariant: a
copy becomes a slot of its node only when it is whole and verified. Called by the keeper of the slots, which puts, and
by replicas, which pull.
"""

import contextlib
import ctypes
import mmap
import os
import shutil
import time
from pathlib import Path

from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.staging.safetensors_header import read_header
from tailrace.deployments.staging.slots import SHARED_MEMORY, AlreadyStaging, MemorySource, Slots, slot_of
from tailrace.deployments.staging.verified import Verifier
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint

PULL_S = 600.0
"""Maximum seconds to wait for a keeper that puts, and for another process of the node that writes its slots."""

LOCK_LOOK_S = 0.05
"""Seconds between two looks at the lock of a node's slots."""

BUFFER_BYTES = 64 << 20
"""Buffer size of the client; tensors are read and written in place."""

PIECE_BYTES = 16 << 20
"""Maximum size of a value in the pool: a larger tensor has several, numbered."""


class Evicted(ValueError):
    """The pool has the list of these weights, and lacks a value. The text is one line."""


def key_of(source: MemorySource, name: str, piece: int = 0) -> str:
    return f"weights/{source.version}/{name}" + (f"#{piece}" if piece else "")


def put(source: MemorySource, folder: Path, endpoint: PoolEndpoint) -> None:
    """Puts the weights in `folder` into the pool, unless it has all of them. Removes those of versions that no slot
    beside `folder` holds, but for this one's neighbours. Raises ValueError, one line, if the pool has no room.
    """
    store = _client(endpoint)
    try:
        files = sorted(folder.glob("*.safetensors"))
        if _known_files(store, source) is not None and _has_all(store, source, files):
            return
        # Earlier versions, which would crowd out KV for ever; and of this one what a stage not committed has left. The
        # version before or after it may be on its way from a third node.
        kept = {source.version - 1, source.version + 1}
        kept |= {version for version, _ in Slots(source.service, folder.parent).held()} - {source.version}
        store.remove_by_regex(f"^weights/(?!({'|'.join(map(str, kept))})/)", force=True)
        for path in files:
            header, begin = read_header(path)
            with _mapped(path, path.stat().st_size, write=False) as (address, view):
                if (code := store.register_buffer(address, len(view))) != 0:
                    raise ValueError(f"weights {source}: the pool does not take their memory: Mooncake says {code}")
                try:
                    _check(source, path.name, store.put(key_of(source, path.name), bytes(view[:begin])))
                    for name, start, size, piece in _pieces(header, begin):
                        _check(source, name, store.put_from(key_of(source, name, piece), address + start, size))
                finally:
                    store.unregister_buffer(address)
        names = "\n".join((source.digest, *(path.name for path in files)))
        _check(source, "its list", store.put(key_of(source, ""), names.encode()))
    finally:
        store.close()


def pull(
    source: MemorySource, pool: PoolConfig, app_name: str, root: Path = SHARED_MEMORY, verifier: Verifier | None = None
) -> Path:
    """Returns this node's slot with weights that this replica, or another one here, has pulled. Raises ValueError.

    `verifier`: the replica's; it remembers what was verified here.
    """
    from tailrace.kvpool.pool import join_pool
    from tailrace.kvpool.status import PoolDown

    slots = Slots(source.service, root)
    lock = _locked(slots, source)
    try:
        if (folder := slot_of(source, root)) is not None:
            return folder
        endpoint = join_pool(pool, app_name)
        store = _client(endpoint)
        try:
            if _known_files(store, source) is None:
                _ask_keepers(source, pool)
            verifier = verifier or Verifier()
            with contextlib.suppress(Evicted):
                return _pulled(store, source, slots, verifier)
            _ask_keepers(source, pool)  # they put all of them again
            return _pulled(store, source, slots, verifier)
        finally:
            store.close()
    except (PoolDown, OSError, KeyError) as error:
        raise ValueError(f"weights {source}: they cannot be pulled from the pool: {one_line(error)}") from error
    finally:
        os.close(lock)


def _locked(slots: Slots, source: MemorySource) -> int:
    """Returns the lock of this node's slots, once no trainer and no other replica writes there. Raises ValueError."""
    until_s = time.monotonic() + PULL_S
    while True:
        try:
            return slots.lock()
        except AlreadyStaging:
            if time.monotonic() > until_s:
                reason = f"another process has been writing to this node's slots for {PULL_S:.0f} s; end it"
                raise ValueError(f"weights {source}: {reason}") from None
        time.sleep(LOCK_LOOK_S)


def _ask_keepers(source: MemorySource, pool: PoolConfig) -> None:
    import ray

    from tailrace.deployments.staging.keeper import keepers

    problem = "no node has them in shared memory"
    for keeper in keepers(source.service):
        try:
            if ray.get(keeper.publish.remote(source, pool), timeout=PULL_S):
                return
        except Exception as error:  # noqa: BLE001 - an error of another node's actor: the next one may have them
            problem = one_line(error)
    raise ValueError(f"weights {source}: {problem}; send them again, or update from a folder")


def _pulled(store, source: MemorySource, slots: Slots, verifier: Verifier) -> Path:
    files = _known_files(store, source)
    if files is None:
        raise ValueError(f"weights {source}: the pool has lost them; send them again, or update from a folder")
    part, slot = slots.part, slots.free((-1, ""))
    for old in (part, slot):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir(mode=0o700)
    try:
        for file in files:
            _pull_file(store, source, part / file)
        verifier.verify(part, source)  # as a slot, a copy with a wrong byte would be found again by every retry
    except BaseException:  # any error: it is raised again
        shutil.rmtree(part, ignore_errors=True)
        raise
    part.rename(slot)
    return slot


def _pull_file(store, source: MemorySource, path: Path) -> None:
    block = store.get(key_of(source, path.name))
    if not block:
        raise Evicted(f"weights {source}: {path.name} is not in the pool any more; send them again")
    path.write_bytes(block)
    path.chmod(0o600)
    header, begin = read_header(path)
    size = begin + max(
        (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
    )
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    with _mapped(path, size, write=True) as (address, _):
        if (code := store.register_buffer(address, size)) != 0:
            raise ValueError(f"weights {source}: the pool does not take this node's memory: Mooncake says {code}")
        try:
            for name, start, count, piece in _pieces(header, begin):
                if store.get_into(key_of(source, name, piece), address + start, count) != count:
                    raise Evicted(f"weights {source}: tensor {name} is not in the pool any more; send them again")
        finally:
            store.unregister_buffer(address)


def _pieces(header: dict, begin: int):
    """Yields (name, place in the file, bytes, number) of each value of the tensors in a file."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        for piece, start in enumerate(range(first, last, PIECE_BYTES)):
            yield name, begin + start, min(PIECE_BYTES, last - start), piece


def _known_files(store, source: MemorySource) -> list[str] | None:
    """Returns the names of the files of exactly these weights in the pool, or None if it does not have them."""
    key = key_of(source, "")
    if store.is_exist(key) != 1:
        return None
    digest, *files = store.get(key).decode().split("\n")
    return files if digest == source.digest else None


def _has_all(store, source: MemorySource, files: list[Path]) -> bool:
    """Returns whether the pool has every value of these files."""
    keys = [key_of(source, path.name) for path in files]
    for header, begin in map(read_header, files):
        keys += [key_of(source, name, piece) for name, _, _, piece in _pieces(header, begin)]
    return all(store.is_exist(key) == 1 for key in keys)


def _check(source: MemorySource, name: str, code: int) -> None:
    if code != 0:
        raise ValueError(
            f"weights {source}: {name} does not fit into the pool (Mooncake says {code}); raise pool.dram_gib"
        )


class _mapped:
    """Maps a file into memory; gives (address, view)."""

    def __init__(self, path: Path, size: int, write: bool):
        self._path, self._size, self._write = path, size, write

    def __enter__(self):
        self._file = self._path.open("r+b" if self._write else "rb")
        flags = mmap.MAP_SHARED if self._write else mmap.MAP_PRIVATE
        # `from_buffer` wants memory that may be written, as mmap gives it; a private mapping never reaches the file.
        self._memory = mmap.mmap(self._file.fileno(), self._size, flags=flags)
        self._bytes = (ctypes.c_char * self._size).from_buffer(self._memory)
        return ctypes.addressof(self._bytes), memoryview(self._memory)

    def __exit__(self, *_):
        del self._bytes
        self._file.close()


def _client(endpoint: PoolEndpoint):
    from mooncake.store import MooncakeDistributedStore  # a large library: on this thread, not at import

    store = MooncakeDistributedStore()
    config = endpoint.config
    setup = (
        endpoint.host,
        "P2PHANDSHAKE",
        0,
        BUFFER_BYTES,
        config.protocol,
        config.rdma_devices,
        endpoint.master_address,
    )
    if (code := store.setup(*setup)) != 0:
        raise OSError(f"the pool's master at {endpoint.master_address} does not answer: Mooncake says {code}")
    return store
