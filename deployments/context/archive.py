"""The history of all prompts, or of one shard's: a folder with a fixed number of files, each with its share of prompts.

Invariant: a prompt's file depends on its key alone, and a file belongs to one shard, whatever their number, see
prompt_files.py. Another number of shards therefore finds all that is there. Files open when first needed. Must be
called by one thread at a time.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.history import History
from tailrace.deployments.context.prompt_files import FILES, file_of


class Archive:
    """Limits and folder come from the configuration. `mine`: numbers of the files that this process works on."""

    def __init__(self, config: ContextConfig, mine: Collection[int]):
        self._config, self.mine = config, mine
        self._files: dict[int, History] = {}

    def of(self, prompt_key: str) -> History:
        """Returns the file of a prompt."""
        return self._file(file_of(prompt_key))

    def files(self) -> Iterator[History]:
        """Returns this process's files, as far as they exist."""
        return (self._file(number) for number in self.mine if number in self._files or self._is_there(number))

    def find(self, name: str) -> tuple[str, str] | None:
        """Returns prompt key and newest group id for a prompt key, group id or prompt id; searches these files."""
        found = (file.find(name) for file in self.files())
        return next((one for one in found if one is not None), None)

    @property
    def problem(self) -> str:
        """Error of an open file that cannot be used; empty if all can be used."""
        return next((file.problem for file in self._files.values() if file.problem), "")

    @property
    def nbytes(self) -> int:
        """Number of packed bytes in the open files."""
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
