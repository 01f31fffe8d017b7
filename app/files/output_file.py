"""Files that a command writes as a whole, once its work is done, under names that users choose.

Invariant: a file that is not of the same kind is never opened for writing; it is refused before the work starts, and
once more before the writing. Every writer of such a file uses this module or `lines_file.py`.
"""

import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from tailrace.app.errors import BadInput, Failed

HEAD_BYTES = 1 << 20
"""Bytes at the start of a file that show its kind."""

GZIP = b"\x1f\x8b"


class OutputKind(NamedTuple):
    """How files of a kind are recognised: one of the prefixes, and every text of `holds` in the first MiB.

    `noun`: for messages, with its article. A gzipped file is recognised by its contents.
    """

    noun: str
    begins: tuple[bytes, ...]
    holds: tuple[bytes, ...] = ()

    def is_of(self, head: bytes) -> bool:
        """Returns whether a file with these first bytes is of the kind. An empty file is of any kind."""
        if not head:
            return True
        if head.startswith(GZIP):
            try:
                head = zlib.decompressobj(31).decompress(head, HEAD_BYTES)
            except zlib.error:
                return False
        return head.startswith(self.begins) and all(text in head for text in self.holds)


@dataclass(frozen=True)
class OutputFile:
    """`option`: the option by which the user named the file. Raises BadInput if it cannot be written or holds something
    else.
    """

    path: Path
    option: str
    kind: OutputKind

    def __post_init__(self):
        if (problem := self._problem()) is not None:
            raise BadInput(f"{self.option} {self.path}: {problem}; give another {self.option}")

    @classmethod
    def of(cls, path: Path | None, option: str, kind: OutputKind) -> "OutputFile | None":
        """Returns the file, or None if the user named none."""
        return None if path is None else cls(path, option, kind)

    def write(self, content: str | bytes) -> None:
        """Writes all of it. Raises Failed if that is no longer possible."""
        if (problem := self._problem()) is not None:
            raise Failed(f"{self.option} {self.path}: {problem}; it is left as it is")
        try:
            self.path.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise Failed(f"{self.option} {self.path}: {error.strerror}") from error

    def _problem(self) -> str | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return folder_problem(self.path.resolve().parent)
        except OSError as error:
            return f"cannot be written: {error.strerror}"
        if (problem := kind_problem(found.st_mode)) is not None:
            return problem
        if not os.access(self.path, os.W_OK):
            return "may not be written"
        return self._other_content() if stat.S_ISREG(found.st_mode) else None

    def _other_content(self) -> str | None:
        try:
            with self.path.open("rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError as error:
            return f"is there and cannot be read: {error.strerror}"
        return None if self.kind.is_of(head) else f"is there and is not {self.kind.noun}, and is left as it is"


def kind_problem(mode: int) -> str | None:
    """Returns why a file of this mode cannot be written, or None. Pipes and terminals can be written."""
    if stat.S_ISDIR(mode):
        return "is a folder, and a file is needed"
    return "is no file" if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode) else None


def folder_problem(folder: Path) -> str | None:
    """Returns why no new file can be made in a folder, or None. Leaves nothing there."""
    if not folder.is_dir():
        return "its folder does not exist"
    try:
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"its folder cannot be written: {error.strerror}"


def output_folder(path: Path, option: str) -> Path:
    """Returns the folder, created if absent. Raises BadInput if it is no folder or cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        problem = folder_problem(path)
    except FileExistsError:
        problem = "is a file, and a folder is needed"
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
    if problem is not None:
        raise BadInput(f"{option} {path}: {problem.replace('its folder', 'it')}; give another folder")
    return path


def check_apart(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]) -> None:
    """Raises BadInput if an output file is also read, or is written twice.

    Links and other spellings of a path are the same file. Both are by option; a path is None if it is not given.
    """
    seen = {place: option for option, path in inputs.items() if path is not None for place in _places(path)}
    for option, path in outputs.items():
        for place in _places(path) if path is not None else ():
            if place in seen and seen[place] != option and not _is_stream(path):
                raise BadInput(f"{option} {path}: is the file of {seen[place]} too; give another {option}")
            seen[place] = option


def _places(path: Path) -> tuple:
    """Returns the file's path, and its inode if it exists."""
    try:
        found = path.stat()
        return path.resolve(), (found.st_dev, found.st_ino)
    except (OSError, RuntimeError):
        return (path.absolute(),) if path.is_symlink() else (path.resolve(),)


def _is_stream(path: Path) -> bool:
    """Returns whether it is /dev/null, a terminal or a pipe, which may be named twice."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)
