"""Outcomes of seeds on disk, one a line, so that a campaign that was stopped can continue later.

Invariant: the outcomes of a file have one code and the same kinds of faults, and each seed is in it once.
"""

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, FiniteFloat

from tailrace.app.errors import BadInput, Failed
from tailrace.app.files.lines_file import LinesFile
from tailrace.policies.protocol.exactness import Exactness

if TYPE_CHECKING:  # it imports Ray, which reading a file does not need
    from tailrace.lab.fuzz.run import Outcome

FOLDERS = "app", "deployments", "kvpool", "policies", "lab"
ROOT = Path(__file__).parents[2]


class OutcomesHead(BaseModel):
    """The first line of a file. `code`: see `code_digest`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    kinds: tuple[str, ...]
    exactness: Exactness = "bits"


class OutcomeLine(BaseModel):
    """An outcome as a campaign keeps it. `faults`: counts by kind. `virtual_s`: seconds of the simulation's clock."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    problem: str | None
    faults: dict[str, int]
    samples: int
    tokens: int
    virtual_s: FiniteFloat

    @classmethod
    def of(cls, outcome: "Outcome") -> "OutcomeLine":
        return cls(
            seed=outcome.seed,
            problem=outcome.problem,
            faults=Counter(fault.kind for fault in outcome.faults),
            samples=outcome.samples,
            tokens=outcome.tokens,
            virtual_s=outcome.seconds,
        )


def code_digest() -> str:
    """Returns a digest of the product's Python files."""
    digest = blake2b(digest_size=8)
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


class OutcomesFile:
    """The file of a campaign. `lines`: by seed. Raises BadInput if the file has other code (see `code_digest`) or other
    kinds of faults."""

    def __init__(self, path: Path, code: str, kinds: Iterable[str], exactness: Exactness = "bits"):
        self.lines: dict[int, OutcomeLine] = {}
        self._path, self._found = path, None
        self._file = LinesFile(path, "an outcome of `tailrace fuzz`", ("code", "kinds"), ("seed", "problem"))
        try:
            self._begin(OutcomesHead(code=code, kinds=sorted(kinds), exactness=exactness))
        except BadInput:
            self.close()
            raise

    def _begin(self, head: OutcomesHead) -> None:
        self._file.read(self._take)
        if self._found is None:
            self._append(head)
        elif self._found != head:
            names = {"code": "code", "kinds": "kinds of faults", "exactness": "exactness"}
            other = next(said for name, said in names.items() if getattr(self._found, name) != getattr(head, name))
            raise BadInput(f"{self._path}: its outcomes are of other {other}; remove it or give another --out")

    def _take(self, line: dict) -> None:
        if self._found is None:
            self._found = OutcomesHead.model_validate(line)
        else:
            one = OutcomeLine.model_validate(line)
            self.lines[one.seed] = one

    def add(self, line: OutcomeLine) -> None:
        """Appends an outcome. Raises Failed, and keeps all earlier outcomes, if the disk is full."""
        self._append(line)
        self.lines[line.seed] = line

    def _append(self, line: BaseModel) -> None:
        try:
            self._file.append(line.model_dump())
        except OSError as error:
            kept = f"{len(self.lines)} outcomes are in it"
            raise Failed(f"{self._path}: {error.strerror}; {kept}, mend it and run again for the rest") from error

    def close(self) -> None:
        self._file.close()
