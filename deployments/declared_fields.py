"""Fields of a class of another package, read from its source without importing it, to check settings passed on to it.

vLLM and TRL take ten seconds to import, and a misspelt key would be found only after a service has started. Called by
`vllm_exact/engine_config.py` and by `app/train/trl_keys.py`.
"""

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tailrace.deployments.keyed_error import KeyedError

PLAIN = {"bool", "int", "float", "str", "None"}
WORDS = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}


@cache
def declared_fields(*places: tuple[str, str, str]) -> dict[str, str] | None:
    """Returns the annotations of the fields of some classes, by name, or None if a source is not here.

    A place: a package, a file in it, and the name of the class.
    """
    found: dict[str, str] = {}
    for package, file, name in places:
        spec = PathFinder.find_spec(package)
        folders = spec.submodule_search_locations if spec is not None else None
        path = Path(next(iter(folders or ()), "")) / file
        if not folders or not path.is_file():
            return None
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                fields = (field for field in node.body if isinstance(field, ast.AnnAssign))
                found |= {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    return {name: of for name, of in found.items() if not name.startswith("_")}


def fitted(given: Mapping[Any, Any], known: Mapping[str, str] | None, owner: str) -> dict[str, Any]:
    """Returns the settings, with texts such as 1e-3 or off converted to numbers and truth values.

    Raises KeyedError for an unknown name, with the nearest one, and for a value of a wrong type. `known`: None accepts
    everything. `owner`: the class that has the fields.
    """
    return {key: _fitted(key, value, known, owner) for key, value in given.items()}


def _fitted(key: Any, value: Any, known: Mapping[str, str] | None, owner: str) -> Any:
    if not isinstance(key, str):
        raise KeyedError(str(key), f"a key is text, not {key!r}; quote it")
    if known is None:
        return value
    if key not in known:
        near = get_close_matches(key.replace("-", "_"), known, n=1)
        raise KeyedError(key, f"{owner} has no such field; " + (f"did you mean {near[0]}?" if near else "remove it"))
    kinds = kinds_of(known[key])
    if not kinds <= PLAIN:
        return value
    try:
        return as_one_of(kinds, value)
    except ValueError as error:
        raise KeyedError(key, str(error)) from error


def kinds_of(annotation: str) -> set[str]:
    """Returns the names of the types in an annotation."""
    optional = re.fullmatch(r"(?:typing\.)?Optional\[(.*)\]", annotation)
    text = f"{optional[1]} | None" if optional else annotation
    return {part.strip() for part in text.split("|")}


def as_one_of(kinds: set[str], value: Any) -> Any:
    """Returns the value as one of some plain types, by their names. Raises ValueError that says which are needed."""
    if value is None and "None" in kinds:
        return None
    if isinstance(value, str) and ("str" not in kinds or value.lower() in ("on", "off", "yes", "no")):
        value = _of_text(kinds, value)
    if isinstance(value, bool):
        fits = "bool" in kinds
    elif isinstance(value, float) and value.is_integer() and "float" not in kinds and "int" in kinds:
        return int(value)
    else:
        fits = (isinstance(value, int) and bool(kinds & {"int", "float"})) or type(value).__name__ in kinds
    if not fits:
        wanted = " or ".join(sorted("null" if kind == "None" else kind for kind in kinds))
        quoting = "; quote it" if "str" in kinds and isinstance(value, bool | int | float) else ""
        raise ValueError(f"{wanted} is needed, not {value!r}"[:200] + quoting)
    return value


def _of_text(kinds: set[str], text: str) -> Any:
    if "bool" in kinds and text.lower() in WORDS:
        return WORDS[text.lower()]
    for read in (int, float) if kinds & {"int", "float"} else ():
        with suppress(ValueError):
            return read(text)
    return text
