"""House rules that a reader can check with the eye, checked without it."""

import ast
import re

import pytest
from test_imports import CHAIN, EVERY, ROOT, sources, tree_of

MOST_LINES = 300
MOST_DOCSTRING_LINES = 12
REASON = re.compile(r"#\s*(noqa: BLE001\s*-*\s*)?(?P<reason>\S.*)?$")
CONFIGURATION = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((*ROOT.glob("*.yaml"), *ROOT.glob("*.yml"), *ROOT.glob("Makefile"), *ROOT.glob("scripts/*")))
    if path.is_file()
]


def broad_catches(source: str) -> list[int]:
    """Lines that catch everything without saying why behind it. A bare `except:` is never excused."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and "suppress" in ast.unparse(node.func):
            caught = node.args
        else:
            continue
        broad = any(isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException") for kind in caught)
        comment = REASON.search(lines[node.lineno - 1])
        if None in caught or (broad and not (comment and len(comment["reason"] or "") >= 10)):
            found.append(node.lineno)
    return found


def test_no_file_is_called_utils():
    """Files are split by noun."""
    assert not [path for path in sources(*CHAIN, "tests") if path.stem in ("utils", "util", "helpers", "common")]


@pytest.mark.parametrize("name", [*EVERY, *(p.relative_to(ROOT).as_posix() for p in sources("tests", "scripts"))])
def test_every_module_says_what_it_is_in_few_lines(name):
    docstring = ast.get_docstring(tree_of(name))
    assert docstring and len(docstring.splitlines()) <= MOST_DOCSTRING_LINES


@pytest.mark.parametrize("name", EVERY)
def test_files_are_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", [*EVERY, *CONFIGURATION])
def test_nothing_listens_on_every_interface(name):
    """A rollout service runs code for whoever reaches it; the address to listen on is named, and local by default."""
    assert "0.0.0.0" not in (ROOT / name).read_text()


@pytest.mark.parametrize("name", EVERY)
def test_whoever_catches_everything_says_why(name):
    assert broad_catches((ROOT / name).read_text()) == []


@pytest.mark.parametrize(
    ("handler", "lines"),
    [
        ("except:  # because I can do it", [3]),
        ("except Exception:", [3]),
        ("except Exception as error:  # noqa: BLE001", [3]),
        ("except (ValueError, BaseException):", [3]),
        ("except Exception as error:  # noqa: BLE001 - the edge of the thread", []),
        ("except Exception:  # the edge of the process", []),
        ("except ValueError:", []),
    ],
)
def test_a_broad_catch_is_found(handler, lines):
    assert broad_catches(f"try:\n    pass\n{handler}\n    pass\n") == lines
    assert broad_catches("with contextlib.suppress(Exception):\n    pass\n") == [1]
