"""Defects planted by hand: one to three lines of the product each, with the checks that find them."""

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "defects"


class Defect(BaseModel):
    """`old`, `new`: text of `file`, which has `old` once. `found_by`: files of tests, one of which fails then."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    file: str
    old: str = Field(min_length=1)
    new: str
    found_by: tuple[str, ...] = Field(min_length=1)

    @property
    def room(self) -> str:
        """The folder of its file."""
        return str(Path(self.file).parent)

    def planted(self, text: str) -> str:
        """The file's text with the defect. Raises ValueError, one line, unless `old` is there once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name!r}: its old text is {count} times in {self.file}; renew the entry")
        return text.replace(self.old, self.new)


def defects() -> list[Defect]:
    """Of all files, in order of their names."""
    return [
        Defect.model_validate(entry)
        for path in sorted(FOLDER.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["defect"]
    ]
