"""House rules that a reader can check with the eye, checked without it."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache

import pytest
from test_imports import CHAIN, EVERY, ROOT, names_of, nodes_of, offences, sources, tree_of

MAX_DOCSTRING_LINES = 12
MAX_POSITIONAL = 5
"""Positional arguments of a constructor: two of six could change places unseen."""

DOCSTRING = re.compile(r'(#[^\n]*\n)*"""(?P<text>.+?)"""', re.DOTALL)
REASON = re.compile(r"#\s*(noqa: BLE001\s*-*\s*)?(?P<reason>\S.*)?$")
CONFIGURATION = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((*ROOT.glob("*.yaml"), *ROOT.glob("*.yml"), *ROOT.glob("Makefile"), *ROOT.glob("scripts/*")))
    if path.is_file()
]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def broad_catches(source: str, tree: ast.Module) -> list[int]:
    """Lines that catch everything without saying why behind it. A bare `except:` is never excused."""
    lines, found = source.splitlines(), []
    for node in nodes_of(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and "suppress" in (
            getattr(node.func, "id", ""),
            getattr(node.func, "attr", ""),
        ):
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


def test_test_files_of_folders_that_are_no_packages_have_names_of_their_own():
    """pytest imports them by their bare names: it stops at the second of a name."""
    plain = [path for path in sources("tests") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in plain if path.name != "conftest.py")
    assert len(names) > 100 and [name for name, count in names.items() if count > 1] == []


def wordy(name: str) -> bool:
    docstring = DOCSTRING.match(text_of(name))
    return not docstring or docstring["text"].strip().count("\n") >= MAX_DOCSTRING_LINES


def test_every_module_says_what_it_is_in_few_lines():
    assert offences([*EVERY, *names_of(sources("tests", "scripts"))], wordy) == {}


def classes_of(tree: ast.Module) -> list[str]:
    return [node.name for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]


def test_no_class_name_stands_for_two_things():
    places = defaultdict(list)
    for name in EVERY:
        for each in classes_of(tree_of(name)):
            places[each].append(name)
    assert {each: files for each, files in places.items() if len(files) > 1} == {}


@cache
def known_classes() -> frozenset[str]:
    return frozenset(each for name in EVERY for each in classes_of(tree_of(name)))


def crowded_calls(tree: ast.Module) -> list[str]:
    """Constructors of ours that are given over MAX_POSITIONAL values without their names; a table's rows aside."""
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    rows = {id(row) for table in tables for row in ast.walk(table)}
    calls = (each for each in nodes_of(tree) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name))
    calls = (call for call in calls if id(call) not in rows)
    crowded = (call for call in calls if call.func.id in known_classes() and len(call.args) > MAX_POSITIONAL)
    return [f"{call.func.id}, line {call.lineno}" for call in crowded]


def test_constructors_with_many_fields_are_called_by_keyword():
    assert offences(EVERY, lambda name: crowded_calls(tree_of(name))) == {}


def defined_names(node: ast.ClassDef) -> set[str]:
    """The attributes that a class itself has: its methods, fields and what its methods assign to `self`."""
    found = {one.attr for one in nodes_of(node) if is_own(one) and isinstance(one.ctx, ast.Store)}
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(one.name)
        for target in getattr(one, "targets", [getattr(one, "target", None)]):
            found |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)} if target else set()
    return found


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def borrowed(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Attributes of `self` that neither the class nor its bases define; none if a base is not among `classes`."""
    known, bases = defined_names(node), [ast.unparse(base).partition("[")[0] for base in node.bases]
    while bases:
        name = bases.pop()
        if name in ("Generic", "Protocol"):
            continue
        if name not in classes:
            return set()
        known |= defined_names(classes[name])
        bases += [ast.unparse(base).partition("[")[0] for base in classes[name].bases]
    used = {one.attr for one in nodes_of(node) if is_own(one)}
    return {name for name in used - known if not name.startswith("__")}


def test_no_class_uses_attributes_that_another_class_is_expected_to_have():
    """A part is an object with what it needs. These alone are mixed into classes of vLLM."""
    classes = {each.name: each for name in EVERY for each in nodes_of(tree_of(name)) if isinstance(each, ast.ClassDef)}
    assert {name for name, each in classes.items() if borrowed(each, classes)} == {
        "ExactWorker",
        "PassClock",
        "TimedEngine",
    }


def test_a_borrowed_attribute_is_found():
    source = """
class Part:
    def ask(self): return self._handle, self.role
class Whole(Part):
    role: str
    def __init__(self): self._handle = 1
    def all(self): return self.ask()
"""
    classes = {each.name: each for each in ast.parse(source).body}
    assert borrowed(classes["Part"], classes) == {"_handle", "role"} and not borrowed(classes["Whole"], classes)


def test_nothing_listens_on_every_interface():
    """A rollout service runs code for whoever reaches it; the address to listen on is named, and local by default."""
    assert offences([*EVERY, *CONFIGURATION], lambda name: "0.0.0.0" in text_of(name)) == {}


def test_whoever_catches_everything_says_why():
    assert offences(EVERY, lambda name: broad_catches(text_of(name), tree_of(name))) == {}


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
    for source, found in (
        (f"try:\n    pass\n{handler}\n    pass\n", lines),
        ("with contextlib.suppress(Exception):\n    pass\n", [1]),
    ):
        assert broad_catches(source, ast.parse(source)) == found


# ---- watching a service ---------------------------------------------------------------------------------

METRICS = names_of(sources("deployments/metrics"))
READ_BY_METRICS = (
    "tailrace.deployments.messages", "tailrace.deployments.metrics", "tailrace.deployments.feed.survey",
    "tailrace.policies.protocol",
)  # fmt: skip
"""Parts of the product that hold no sample, and the survey, which reads them."""


def foreign_writes(tree: ast.Module) -> list[int]:
    """Lines that set an attribute of another object than `self`."""
    return [
        node.lineno
        for node in nodes_of(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and root_of(node) != "self"
    ]


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", "")


def test_whatever_watches_a_service_writes_to_itself_alone():
    watchers = [*METRICS, *(f"deployments/feed/{name}.py" for name in ("survey", "sections", "looks"))]
    assert offences(watchers, lambda name: foreign_writes(tree_of(name))) == {}
    assert foreign_writes(ast.parse("sample.tokens += 1\nself.a.b = 2\nself.c[sample.index] = 3")) == [1]


def imported_by(tree: ast.Module) -> set[str]:
    found = {node.module for node in nodes_of(tree) if isinstance(node, ast.ImportFrom)}
    return {name for name in found if name.startswith("tailrace.")}


def test_metrics_import_nothing_that_holds_a_sample():
    def others(name: str) -> set[str]:
        return {one for one in imported_by(tree_of(name)) if not one.startswith(READ_BY_METRICS)}

    assert offences(METRICS, others) == {}


def calls_of(tree: ast.Module, name: str) -> int:
    return sum(isinstance(node, ast.Call) and getattr(node.func, "id", "") == name for node in nodes_of(tree))


def test_a_snapshot_has_one_builder():
    built = {name: count for name in EVERY if (count := calls_of(tree_of(name), "ServiceSnapshot"))}
    assert built == {"deployments/coordinator/snapshot.py": 1}
