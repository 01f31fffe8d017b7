"""The disk of a simulated cluster, with the folders of weights and of adapters, and the adapters of one engine.

Invariant: a content is one string, and its digest names it.
"""

from dataclasses import dataclass, field

from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.errors import AdapterRefused

TORN = "torn"
"""Content of a folder whose files do not fit the model, or hold NaN."""


def digest_of(content: str) -> str:
    """Returns the digest of weights of this content."""
    return f"digest-of-{content}"


@dataclass
class Disk:
    """Weights folders by name; the content of each is one string."""

    folders: dict[str, str] = field(default_factory=dict)

    def read(self, folder: str) -> str:
        """Returns the content of a folder. Raises ValueError, in one line, if no model can be loaded from it."""
        if not isinstance(folder, str) or folder not in self.folders:
            raise ValueError(f"weights folder {folder}: no such folder on this machine")
        if self.folders[folder] == TORN:
            raise ValueError(f"weights folder {folder}: model.safetensors cannot be read")
        return self.folders[folder]


class SimulatedAdapters:
    """The adapters of one engine, by the stepper's interface. Their folders are on the disk of the weights."""

    def __init__(self, disk: Disk):
        self._disk = disk
        self._loaded: set[str] = set()  # digests
        self._known: dict[str, Adapter] = {}

    def load(self, path: str) -> str:
        try:
            digest = digest_of(self._disk.read(path))
        except ValueError as error:
            raise AdapterRefused(str(error)) from error
        self._loaded.add(digest)
        return digest

    def take(self, adapter: Adapter) -> None:
        """Loads the adapter of a chunk. Raises AdapterRefused if its folder holds another content by now."""
        if adapter.digest not in self._loaded and self.load(adapter.path) != adapter.digest:
            raise AdapterRefused(f"adapter {adapter.name}: {adapter.path} holds another content by now")
        self.name(adapter)

    def name(self, adapter: Adapter) -> None:
        if adapter.version >= self._known.get(adapter.name, adapter).version:
            self._known[adapter.name] = adapter

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    def known(self) -> tuple[Adapter, ...]:
        return tuple(self._known.values())


def adapted(content: str, adapter: str) -> str:
    """Returns the content that decides tokens: the content of the weights, with an adapter's digest if there is one."""
    return f"{content}+{adapter}" if adapter else content
