"""Rows of a run by step: one line of JSON each, on disk before the next step begins."""

import os
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from tailrace.app.errors import BadInput

Row = TypeVar("Row", bound=BaseModel)


class RowFile(Generic[Row]):
    """Rows of `kind`, which has a `step`. A last line that a crash has cut off is not read.

    Raises BadInput for another line, so that nothing is lost.
    """

    def __init__(self, path: Path, kind: type[Row]):
        self.path = path
        self.rows: list[Row] = []
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        for number, line in enumerate(lines[:-1], 1):
            try:
                self.rows.append(kind.model_validate_json(line))
            except ValidationError as error:
                raise BadInput(f"{path} line {number}: not a row of a run; give another --out") from error

    def append(self, row: Row) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(row.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drops the rows after `step`, and a line that was cut off."""
        self.rows = [row for row in self.rows if row.step <= step]
        part = self.path.with_suffix(".part")
        part.write_text("".join(row.model_dump_json() + "\n" for row in self.rows))
        part.replace(self.path)
