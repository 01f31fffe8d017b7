"""The mutants of a file: each is one change in one function."""

import ast
import copy
import hashlib
from pathlib import Path
from typing import NamedTuple

from mutants.operators import changes

ROOT = Path(__file__).resolve().parents[2]
COMPILED = ("jit", "vectorize", "kernel")
"""Decorators whose functions run compiled: their code objects are not those that run."""


class Mutant(NamedTuple):
    """`place`: number of the change among those of its file. `old` and `new`: the line before and after."""

    file: str
    function: str
    rule: str
    line: int
    place: int
    old: str
    new: str

    @property
    def key(self) -> str:
        """Its name: equal as long as its function's name and its line's text are."""
        return f"{self.file} {self.function} {self.rule}: {self.old} -> {self.new}"

    @property
    def rank(self) -> str:
        """The order in which mutants are drawn: by chance, and the same in each run."""
        return hashlib.sha256(self.key.encode()).hexdigest()


class Finder(ast.NodeTransformer):
    """Visits a file's functions. `mutants`: all changes, numbered; the change numbered `wanted` is made."""

    def __init__(self, file: str, text: str, wanted: int = -1):
        self.file = file
        self.lines = text.splitlines()
        self.wanted = wanted
        self.mutants: list[Mutant] = []
        self.names: list[str] = []
        self.inside = 0
        self.used: list[ast.Name] = []

    def visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return self.named(node)
        if not self.inside or isinstance(node, ast.JoinedStr) or is_docstring(node):
            return node if self.inside else super().generic_visit(node)
        chosen = node
        for rule, new in changes(node):
            if self.seen(rule, node, new):
                self.used = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
                chosen = ast.copy_location(new, node) if new is not None else ast.copy_location(ast.Pass(), node)
        return chosen if chosen is not node else super().generic_visit(node)

    def named(self, node):
        """A class or a function: its decorators, defaults and annotations stay as they are."""
        compiled = any(part in ast.unparse(one) for one in node.decorator_list for part in COMPILED)
        if compiled:
            return node
        deeper = not isinstance(node, ast.ClassDef)
        self.names.append(node.name)
        self.inside += deeper
        node.body = [self.visit(one) for one in node.body]
        if self.used and deeper:
            node.body.append(mention(self.used, node.body[-1]))
            self.used = []
        self.inside -= deeper
        self.names.pop()
        return node

    def seen(self, rule: str, node: ast.AST, new: ast.AST | None) -> bool:
        """Whether this change is the wanted one."""
        after = ast.unparse(ast.fix_missing_locations(copy.deepcopy(new))) if new is not None else "pass"
        old = ast.unparse(node)
        number = len(self.mutants)
        function = ".".join(self.names)
        self.mutants.append(Mutant(self.file, function, rule, node_line(node), number, short(old), short(after)))
        return number == self.wanted


def mention(names: list[ast.Name], beside: ast.AST) -> ast.If:
    """A line that never runs. With it a changed function still has each name from outside that the whole one has, as
    Python asks of code that is put into a loaded function."""
    loads = [ast.Name(one.id, ast.Load()) for one in names]
    return ast.copy_location(ast.If(ast.Constant(False), [ast.Expr(ast.Tuple(loads, ast.Load()))], []), beside)


def node_line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0) or min(
        (one.lineno for one in ast.walk(node) if hasattr(one, "lineno")), default=0
    )


def short(text: str) -> str:
    """The first line of a statement, cut after 160 characters."""
    return text.splitlines()[0][:160]


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def mutants(file: str) -> list[Mutant]:
    """Of one file, by its path below the repository. Those with the same key are counted: `#2` for the second."""
    text = (ROOT / file).read_text()
    finder = Finder(file, text)
    finder.visit(ast.parse(text))
    counts: dict[str, int] = {}
    numbered = []
    for one in finder.mutants:
        counts[one.key] = number = counts.get(one.key, 0) + 1
        numbered.append(one._replace(rule=f"{one.rule} #{number}") if number > 1 else one)
    return numbered


def mutated(mutant: Mutant) -> ast.Module:
    """The file's tree with the change."""
    text = (ROOT / mutant.file).read_text()
    return ast.fix_missing_locations(Finder(mutant.file, text, mutant.place).visit(ast.parse(text)))
