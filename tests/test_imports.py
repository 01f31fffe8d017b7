"""Who may import whom, read from the source of every file: imports inside functions and dotted paths in strings too."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHAIN = ("policies", "kvpool", "deployments", "app")
"""Each folder may import itself and what stands to its left."""

HEAVY = {"ray", "vllm", "torch"}
PURE = {
    "bisect", "collections", "dataclasses", "difflib", "enum", "functools", "hashlib", "heapq", "importlib",
    "itertools", "math", "numpy", "operator", "pydantic", "typing",
}  # fmt: skip
"""All that a policy may need: nothing of these reads a clock, a file, a socket, the environment or a generator."""

EVERY_PROCESS = ("tailrace.app.build", "tailrace.app.client", "tailrace.app.cluster")
"""What drivers load, and with it the coordinator and the replicas before they have an engine."""

ENGINES_ALONE = {"vllm", "torch", "numba", "transformers"}
"""Seconds of every process that loads them; vLLM and numba read settings that `launch` makes first."""

ENVIRONMENT_WRITER = "deployments/vllm_exact/launch.py"
"""vLLM takes some settings from the environment only; this file writes them before vLLM is imported."""

DOTTED_PATH = re.compile(rf"({'|'.join(CHAIN)})(\.[A-Za-z_]\w*)+(:\w+)?")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def names_of(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


EVERY = names_of(sources(*CHAIN))


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(), name)


def offences(names: list[str], found_in: Callable[[str], object]) -> dict[str, object]:
    """What a rule finds, by file. Of all files in one test: a thousand small tests took longer than their looks."""
    return {name: found for name in names if (found := found_in(name))}


def imports_of(tree: ast.Module) -> set[str]:
    """Full names of all that a file imports, or names by dotted path in a string."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED_PATH.fullmatch(node.value):
            found.add(node.value.replace(":", "."))
    return found


def wrong_ways(name: str, tree: ast.Module) -> set[str]:
    """Imports to the right, of a file that stands in one of the four folders."""
    rank = CHAIN.index(Path(name).parts[0])
    return {found for found in imports_of(tree) if found.split(".")[0] in CHAIN[rank + 1 :]}


def impurities(tree: ast.Module) -> set[str]:
    """What a policy must not use: modules beyond PURE, `hash()`, a generator, or another way to open something."""
    found = {name for name in imports_of(tree) if name.split(".")[0] not in PURE | {"policies"}}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & {"hash", "open", "id", "eval", "exec", "__import__", "input", "print"}
        elif isinstance(node, ast.Attribute) and node.attr == "random":
            found.add("random")
    return found


def environment_uses(tree: ast.Module) -> list[str]:
    """`read` or `write` for each use of the environment."""
    stored = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    stored |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "update"}
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            uses += ["read" for alias in node.names if alias.name in ("environ", "environb", "getenv")]
        elif isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb"):
            uses.append("write" if id(node) in stored else "read")
    return uses


def beyond_the_simulator(name: str) -> set[str]:
    """Imports that a file of the simulator must not have."""
    found = imports_of(tree_of(name))
    allowed = re.compile(r"(policies|app\.config|app\.simulator)\b")
    return {each for each in found if each.split(".")[0] in {*CHAIN, *HEAVY} and not allowed.match(each)}


def loaded(*modules: str) -> dict[str, str]:
    """All that these import as they are loaded, ours in turn; by name, with the file that does."""
    found, left = {}, list(modules)
    while left:
        name = left.pop().replace(".", "/") + ".py"
        if name in EVERY:
            tops = [node for node in tree_of(name).body if isinstance(node, ast.Import | ast.ImportFrom)]
            new = {each: name for each in imports_of(ast.Module(tops, [])) if each not in found}
            found |= new
            left += [each for full in new for each in (full, full.rpartition(".")[0])]
    return found


def test_nothing_imports_to_the_right():
    assert offences(EVERY, lambda name: wrong_ways(name, tree_of(name))) == {}


def test_policies_are_pure():
    assert offences(names_of(sources("policies")), lambda name: impurities(tree_of(name))) == {}


def test_the_environment_is_read_in_app_alone():
    found = offences(names_of(sources(*CHAIN[:3])), lambda name: set(environment_uses(tree_of(name))))
    assert found == {ENVIRONMENT_WRITER: {"write"}}


def test_the_simulator_imports_policies_and_the_configuration_only():
    assert offences([name for name in EVERY if name.startswith("app/simulator")], beyond_the_simulator) == {}


def test_policies_simulator_and_configuration_load_nothing_heavy():
    """By a fresh interpreter, so that what is imported in turn counts too."""
    light = [name for name in EVERY if re.match(r"(policies|app/simulator|app/config)\b", name)]
    modules = [name.removesuffix(".py").replace("/", ".") for name in light]
    code = f"import sys, importlib\nfor m in {modules}:\n importlib.import_module(m)\n"
    code += f" found = {HEAVY} & set(sys.modules)\n if found: sys.exit(f'{{m}} loads {{found}}')"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_what_every_process_loads_brings_no_engine():
    found = loaded(*EVERY_PROCESS)
    assert {"deployments/coordinator/coordinator.py", "deployments/engine/stepper.py"} <= set(found.values())
    assert {name: file for name, file in found.items() if name.split(".")[0] in ENGINES_ALONE} == {}


# ---- these tests can fail ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("policies/x.py", "import kvpool.keys"),
        ("kvpool/x.py", "def f():\n    from deployments.messages import ChunkRequest"),
        ("deployments/x.py", "import app"),
        ("deployments/x.py", "WORKER = 'app.bench.scheduler:measure'"),
    ],
)
def test_a_wrong_import_is_found(name, source):
    assert wrong_ways(name, ast.parse(source))
    assert not wrong_ways("app/x.py", ast.parse(source))


def test_what_is_loaded_in_turn_is_found():
    assert loaded("tailrace.deployments.engine.pool_client")["torch"] == "kvpool/worker.py"


@pytest.mark.parametrize(
    "source",
    ["import time", "from os import path", "def f():\n    import ray", "hash('a')", "np.random.rand()", "open('x')"],
)
def test_an_impurity_is_found(source):
    assert impurities(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("os.environ['A']", ["read"]),
        ("os.environ.get('A')", ["read"]),
        ("os.getenv('A')", ["read"]),
        ("from os import environ", ["read"]),
        ("os.environ['A'] = 'b'", ["write"]),
        ("os.environ.update(a)", ["write"]),
        ("dict(os.environ, A='b')", ["read"]),
    ],
)
def test_a_use_of_the_environment_is_found(source, uses):
    assert environment_uses(ast.parse(source)) == uses
