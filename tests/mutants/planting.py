"""Puts a changed function in the place of the one that is loaded, in this process alone."""

import ast
import gc
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

from mutants.mutant import ROOT, Mutant, mutated


def codes(code: CodeType) -> list[CodeType]:
    """A code object and those inside it, outer ones first."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [code, *(deeper for one in inner for deeper in codes(one))]


@cache
def real(file: str) -> Path:
    return Path(file).resolve()


def functions(file: Path) -> list[FunctionType]:
    """All loaded functions of a file."""
    return [one for one in gc.get_objects() if isinstance(one, FunctionType) and real(one.__code__.co_filename) == file]


def plant(mutant: Mutant) -> int:
    """Returns how many loaded functions have changed: 0 if the change is in none of them."""
    path = (ROOT / mutant.file).resolve()
    before = codes(compile(path.read_text(), str(path), "exec"))
    after = codes(compile(mutated(mutant), str(path), "exec"))
    loaded = functions(path)
    pairs = list(zip(before, after, strict=True)) if len(before) == len(after) else outer(before, after)
    count = 0
    for old, new in pairs[1:]:
        if old != new:
            for one in loaded:
                if one.__code__ == old:
                    one.__code__ = new
                    count += 1
    return count


def outer(before: list[CodeType], after: list[CodeType]) -> list[tuple[CodeType, CodeType]]:
    """Pairs by name and line, where the change has deleted a function inside another."""
    found = {(one.co_qualname, one.co_firstlineno): one for one in after}
    known = [(one, found.get((one.co_qualname, one.co_firstlineno))) for one in before]
    return [(one, new) for one, new in known if new is not None]


def compiles(mutant: Mutant) -> bool:
    try:
        compile(mutated(mutant), mutant.file, "exec")
    except (SyntaxError, ValueError, TypeError):
        return False
    return ast.dump(mutated(mutant)) != ast.dump(ast.parse((ROOT / mutant.file).read_text()))
