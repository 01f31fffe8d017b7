"""The two slots of a service's weights in this node's shared memory, and the name of weights in a slot.

Invariant: a slot is a folder that appears by one rename, so it is whole or absent, and the slot of the version in use
is never touched. One process writes at a time. Folders are readable by their owner alone. Used by `Stage`, by the
replicas, and by the keeper, which removes them.
"""

import fcntl
import os
import re
import shutil
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from tailrace.deployments.staging.safetensors_header import read_header

SHARED_MEMORY = Path("/dev/shm")

SLOTS = (0, 1)
"""One for the version in use and one for the next: a third would cost a model's size again."""

PREFIX = "memory:"
FORM = re.compile(r"memory:(?P<service>[A-Za-z0-9_.-]+)/(?P<version>[0-9]+)/(?P<digest>[0-9a-f]{16})")


class MemorySource(NamedTuple):
    """Weights in shared memory or in the pool, by service, version and digest. Its text is a source of weights."""

    service: str
    version: int
    digest: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.service}/{self.version}/{self.digest}"


def is_memory(source: object) -> bool:
    return isinstance(source, str) and source.startswith(PREFIX)


def memory_source(source: str) -> MemorySource:
    """Parses a source. Raises ValueError, one line."""
    if (match := FORM.fullmatch(source)) is None:
        raise ValueError(f"weights {source}: not a name that `send_weights` makes, memory:SERVICE/VERSION/DIGEST")
    return MemorySource(match["service"], int(match["version"]), match["digest"])


def service_name(app_name: str, cluster: str) -> str:
    """Returns the name of an application's slots. `cluster`: its address, since another cluster here may run the same
    application.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", app_name)
    return f"{plain}-{blake2b(cluster.encode(), digest_size=4).hexdigest()}"


class AlreadyStaging(ValueError):
    """Weights of this service are being staged already."""


@dataclass(frozen=True)
class Slots:
    """The slots of one service on this node. `root`: a folder in memory."""

    service: str
    root: Path = SHARED_MEMORY

    def folder(self, number: int) -> Path:
        return self.root / f"tailrace-{self.service}-{number}"

    @property
    def part(self) -> Path:
        """The folder that is being written."""
        return self.root / f"tailrace-{self.service}-part"

    def held(self) -> dict[tuple[int, str], Path]:
        """Returns folders by the version and digest of the weights in them."""
        found = {}
        for folder in map(self.folder, SLOTS):
            if (name := _name_in(folder)) is not None:
                found[name] = folder
        return found

    def free(self, served: tuple[int, str]) -> Path:
        """Returns the slot to write next: an empty one, else the one of the lower version that is not `served`."""
        names = {folder: name for name, folder in self.held().items()}
        others = [folder for folder in map(self.folder, SLOTS) if names.get(folder) != served]
        return min(others, key=lambda folder: names.get(folder, (-1, "")))

    def lock(self) -> int:
        """Returns a descriptor that excludes other writers until it is closed. Raises AlreadyStaging."""
        path = self.root / f"tailrace-{self.service}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise AlreadyStaging(
                f"weights of {self.service} are being staged on this node already; commit or drop them"
            ) from None
        return lock

    def remove(self) -> None:
        """Removes everything: the service has ended."""
        for folder in (*map(self.folder, SLOTS), self.part):
            shutil.rmtree(folder, ignore_errors=True)
        (self.root / f"tailrace-{self.service}.lock").unlink(missing_ok=True)


def slot_of(source: MemorySource, root: Path = SHARED_MEMORY) -> Path | None:
    """Returns the folder on this node that holds these weights, or None."""
    return Slots(source.service, root).held().get((source.version, source.digest))


def _name_in(folder: Path) -> tuple[int, str] | None:
    """Returns version and digest of the weights in a slot, or None if it is empty or not ours."""
    try:
        files = sorted(folder.glob("*.safetensors"))
        found = {(int(m["version"]), m["digest"]) for m in (read_header(path)[0]["__metadata__"] for path in files)}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next(iter(found)) if len(found) == 1 else None
