"""YAML from files that people write. Every fault is a ValueError of one line, with the line where it is known.

Plain scalars are read by the core schema of YAML 1.2: `off` and `12:30` are text, `1e-3` is a number, only true and
false are truth values. PyYAML reads YAML 1.1, whose surprises no one means.
"""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from tailrace.app.strict_json import bounded, decoded_text, key_of_broken_text

MAX_BYTES = 1 << 20
"""Maximum size: the longest file of this project has 20 kB; one that refers to itself many times can fill the
memory.
"""

MAX_NODES = 1 << 17
"""Maximum nodes of a file with its aliases expanded: 130 times those of the longest file of this project."""

TAG = "tag:yaml.org,2002:"
SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)
"""Kinds of plain scalars: tag, pattern, and the characters that one may begin with."""


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys: YAML forbids them, and PyYAML uses the last."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML's own name for a table of the class

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != f"{TAG}merge":
                if key_node.value in seen:
                    raise _at(key_node, f"{key_node.value}: the key is there twice")
                if key_node.tag in (f"{TAG}null", f"{TAG}bool"):
                    raise _at(key_node, f"{key_node.value or 'empty'}: no name of a key; quote it if it is meant")
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def get_single_node(self):
        node = super().get_single_node()
        if node is not None and _written_out(node, {}) > MAX_NODES:
            raise ValueError("its aliases refer to one another so that it would fill the memory; write it out")
        return node

    def truth(self, node) -> bool:
        if (text := self.construct_scalar(node).lower()) not in ("true", "false"):
            raise _at(node, f"{text}: give true or false")
        return text == "true"

    def integer(self, node) -> int:
        text = self.construct_scalar(node).replace("_", "")
        digits = text.lstrip("+-")
        if re.fullmatch("0[0-9]+", digits):
            raise _at(node, f"{text}: some readers take it as octal; write {digits.lstrip('0') or 0}, or quote a text")
        if not re.fullmatch(r"[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+", digits):
            raise _at(node, f"{text}: no integer")
        try:
            return bounded(lambda given: int(given, 0), text)
        except ValueError as error:
            raise _at(node, str(error)) from error

    def real(self, node) -> float:
        text = self.construct_scalar(node).replace("_", "")
        try:
            value = float(text)
        except ValueError:
            value = math.nan  # .inf, .nan, or text with an explicit tag
        if not math.isfinite(value):
            raise _at(node, f"{text}: give a finite number")
        return value


for _tag, _pattern, _first in SCALARS:
    _Loader.add_implicit_resolver(TAG + _tag, re.compile(f"(?:{_pattern})$"), [c.strip("\0") for c in _first])
_Loader.yaml_constructors = {
    tag: read
    for tag, read in yaml.SafeLoader.yaml_constructors.items()
    if tag in (None, *(TAG + kind for kind in ("null", "str", "seq", "map")))
}  # our files have no other kinds, such as dates and sets
_Loader.add_constructor(f"{TAG}bool", _Loader.truth)
_Loader.add_constructor(f"{TAG}int", _Loader.integer)
_Loader.add_constructor(f"{TAG}float", _Loader.real)


def _at(node: yaml.Node, problem: str) -> ValueError:
    return ValueError(f"line {node.start_mark.line + 1}: {problem}")


def _written_out(node: yaml.Node, known: dict[yaml.Node, int | None]) -> int:
    """Returns the number of nodes of a node with its aliases expanded. `known`: by node; None while it is counted."""
    if node not in known:
        known[node] = None
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        each = (part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,)))
        known[node] = 1 + sum(_written_out(part, known) for part in each)
    if (size := known[node]) is None:
        raise _at(node, "an alias names the very thing that it is in")
    return size


def read_yaml(path: Path) -> Any:
    """Returns the value in a file. Raises OSError."""
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes; {MAX_BYTES} is the limit")
    text = decoded_text(data)
    try:
        value = yaml.load(text, _Loader)
        broken = key_of_broken_text(value)
    except RecursionError as error:
        raise ValueError("not usable: it is nested too deeply") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{where}not YAML: {problem}") from error
    if broken is not None:
        raise ValueError(f"{broken or 'text'}: half of a surrogate pair; give both halves or the character")
    return value
