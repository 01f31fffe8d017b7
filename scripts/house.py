"""Prints figures of the repository's size: lines and files by folder, the files on a sample's way, moves from file to
file, definitions of verbs, parameters of constructors.

`--json` prints the figures for programs. tests/house/test_house_figures.py reads them, and limits the way, moves, verbs
and constructors.
"""

import argparse
import ast
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("app", "deployments", "kvpool", "policies")
FOLDERS = (*PRODUCT, "lab", "tests", "docs")
VERBS = (
    "transfer_weights", "fall_asleep", "read_weights", "update_weights", "load_weights", "wake_kv", "peek",
    "load_adapter",
)  # fmt: skip
"""Names of calls that pass from a driver through every layer to an engine."""

LARGEST = 10


def sources(folder: str, ending: str = "py") -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob(f"*.{ending}") if "__pycache__" not in path.parts)


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


def sizes() -> dict[str, dict[str, int]]:
    """Returns files and lines of each folder of FOLDERS: Markdown in docs, else Python."""
    found = {name: sources(name, "md" if name == "docs" else "py") for name in FOLDERS}
    return {name: {"files": len(paths), "lines": sum(map(lines_of, paths))} for name, paths in found.items()}


def rooms() -> dict[str, dict[str, int]]:
    """Returns files and lines of each folder of the product that has Python files, without its subfolders."""
    files, lines = Counter(), Counter()
    for path in (path for name in PRODUCT for path in sources(name)):
        room = path.parent.relative_to(ROOT).as_posix()
        files[room] += 1
        lines[room] += lines_of(path)
    return {room: {"files": files[room], "lines": lines[room]} for room in sorted(files)}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def definitions() -> dict[str, list[str]]:
    """Returns for each verb the product's files that define it, as a function or as a row of `Passed`. A leading
    underscore is ignored.
    """
    found: dict[str, list[str]] = {verb: [] for verb in VERBS}
    for path in (path for name in PRODUCT for path in sources(name)):
        for node in nodes_of(path):
            name = None
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = node.name
            elif isinstance(node, ast.Assign) and getattr(getattr(node.value, "func", None), "id", "") == "Passed":
                name = ast.unparse(node.targets[0])
            if name is not None and name.lstrip("_") in found:
                found[name.lstrip("_")].append(path.relative_to(ROOT).as_posix())
    return found


def constructors() -> dict[str, int]:
    """Returns the number of parameters of each class's `__init__` in the product, without `self`."""
    found = {}
    for path in (path for name in PRODUCT for path in sources(name)):
        for node in nodes_of(path):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    arguments = method.args
                    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                    found[node.name] = len(every) - 1
    return found


def path() -> dict[str, int]:
    """Returns the lines of each file on a sample's way, in reading order: docs/life_of_a_sample.md, steps 1 to 10.

    Books and kernels, which that page names after the steps, are not counted.
    """
    steps = (ROOT / "docs" / "life_of_a_sample.md").read_text().partition("Books and kernels")[0]
    return {name: lines_of(ROOT / name) for name in re.findall(r"`([\w/]+\.py)`", steps)}


def ways() -> dict[str, dict[str, int]]:
    """Returns files, moves and returns of each list of files in docs/life_of_a_sample.md, by the list's name. A move
    goes from one file to the next, a return to a file that the list already has.
    """
    page = (ROOT / "docs" / "life_of_a_sample.md").read_text()
    found = {}
    for name, text in re.findall(r"^```way (\w+)\n(.*?)^```", page, re.S | re.M):
        files = [one.strip() for one in text.split(">")]
        moves, different = len(files) - 1, len(set(files))
        found[name] = {"files": different, "moves": moves, "returns": len(files) - different}
    return found


def report(figures: dict) -> str:
    """Returns the figures as text."""
    lines = [f"{name:<14}{one['files']:>6} files {one['lines']:>8,} lines" for name, one in figures["folders"].items()]
    product = sum(figures["folders"][name]["lines"] for name in PRODUCT)
    lines += [f"{'the four':<14}{'':>12} {product:>8,} lines", ""]
    lines += [f"{len(files)} x {verb}: {', '.join(files)}" for verb, files in figures["verbs"].items()]
    way = figures["path"]
    lines += ["", f"the way of a sample: {len(way)} files, {sum(way.values()):,} lines", *(f"  {n}" for n in way)]
    for name, one in figures["ways"].items():
        lines.append(f"the way of {name}: {one['files']} files, {one['moves']} moves, {one['returns']} returns")
    largest = sorted(figures["constructors"].items(), key=lambda one: (-one[1], one[0]))[:LARGEST]
    return "\n".join([*lines, "", "constructors: " + ", ".join(f"{name} {count}" for name, count in largest)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="the size of the house: lines, a sample's way, engine verbs, constructors"
    )
    parser.add_argument("--json", action="store_true", help="for programs, with each room")
    figures = {"folders": sizes(), "rooms": rooms(), "path": path(), "ways": ways()}
    figures |= {"verbs": definitions(), "constructors": constructors()}
    print(json.dumps(figures, indent=1) if parser.parse_args().json else report(figures))


if __name__ == "__main__":
    main()
