"""The history of all prompts, or of one shard's: a folder of a fixed number of files, each with its share of prompts.

Invariant: a prompt's file depends on its key alone, and a file belongs to one shard, whatever their number, see
`shard_set`; so another number of shards finds all that is there. Files open when first needed. One thread at a time
calls.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.history import History
from tailrace.deployments.context.shard_set import FILES, file_of


class Archive:
    """Bounds and folder are the configuration's; `mine`: numbers of the files that this process works on."""

    def __init__(self, config: ContextConfig, mine: Collection[int]):
        self._config, self.mine = config, mine
        self._files: dict[int, History] = {}

    def of(self, prompt_key: str) -> History:
        """The file that a prompt is in."""
        return self._file(file_of(prompt_key))

    def files(self) -> Iterator[History]:
        """This process's, as far as they are there."""
        return (self._file(number) for number in self.mine if number in self._files or self._is_there(number))

    def find(self, name: str) -> tuple[str, str] | None:
        """Prompt key and newest group id of a prompt key, group id or prompt id; looks into every file."""
        found = (file.find(name) for file in self.files())
        return next((one for one in found if one is not None), None)

    def release(self, number: int) -> bytes | None:
        """Close a file. Returns its contents if it is in memory alone, and has any."""
        if number not in self._files:
            return None
        file = self._files.pop(number)
        packed = file.packed()
        file.close()
        return packed

    def adopt(self, number: int, packed: bytes | None) -> None:
        """Take in the contents that `release` has returned elsewhere."""
        if packed is not None:
            self._file(number).adopt(packed)

    @property
    def problem(self) -> str:
        """Why a file that is open cannot be used; empty: all can."""
        return next((file.problem for file in self._files.values() if file.problem), "")

    @property
    def nbytes(self) -> int:
        """Packed bytes in the files that are open."""
        return sum(file.nbytes for file in self._files.values())

    def _file(self, number: int) -> History:
        if number not in self._files:
            most_bytes = self._config.history_mib * 2**20 / FILES
            self._files[number] = History(self._path(number), self._config.history_epochs, most_bytes)
        return self._files[number]

    def _is_there(self, number: int) -> bool:
        path = self._path(number)
        return path is not None and path.exists()

    def _path(self, number: int) -> Path | None:
        folder = self._config.history_dir
        return None if folder is None else Path(folder) / f"history-{number:x}.sqlite"
