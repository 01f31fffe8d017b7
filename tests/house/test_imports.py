"""The import laws, read from the source of every file: imports inside functions and dotted paths in strings too.

Folders: `policies <- kvpool <- deployments <- app <- lab`. Rooms: arrows among them run downwards in ROOMS, never up.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHAIN = ("policies", "kvpool", "deployments", "app", "lab")
"""Each folder may import itself and the folders to its left."""

ROOMS = (
    "policies",
    "policies/protocol",
    "policies/models",
    "policies/families",
    "policies/core",
    "kvpool",
    "deployments",
    "deployments/features",
    "deployments/results",
    "deployments/messages",
    "deployments/channel",
    "deployments/constraints",
    "deployments/context",
    "deployments/draft_index",
    "deployments/staging",
    "deployments/vllm_exact",
    "deployments/drafter",
    "deployments/drafting",
    "deployments/engine",
    "deployments/batches",
    "deployments/feed",
    "deployments/metrics",
    "deployments/coordinator",
    "app/calls",
    "app/http",
    "app/style",
    "app/board",
    "app/gateway",
    "app",
    "app/files",
    "app/distill",
    "app/watch",
    "app/weights",
    "app/trl",
    "app/train",
    "app/commands",
    "lab",
    "lab/simulator",
    "lab/simulated_training",
    "lab/report",
    "lab/timeline",
    "lab/replay",
    "lab/demo",
    "lab/verification",
    "lab/training_certificate",
    "lab/soak",
    "lab/fuzz",
    "lab/commands",
    "lab/research",
    "lab/benchmarks",
)
"""The rooms of the product, lowest first: a room imports lower rooms alone."""

HEAVY = {"ray", "vllm", "torch"}
PURE = {
    "bisect", "collections", "dataclasses", "difflib", "enum", "functools", "hashlib", "heapq", "importlib",
    "itertools", "math", "numpy", "operator", "pydantic", "typing",
}  # fmt: skip
"""All that a policy may need: nothing of these reads a clock, a file, a socket, the environment or a generator."""

EVERY_PROCESS = ("tailrace.app.build", "tailrace.app.calls.client", "tailrace.app.cluster")
"""What drivers load, and with it the coordinator and the replicas before they have an engine."""

ENGINES_ALONE = {"vllm", "torch", "numba", "transformers"}
"""Seconds of every process that loads them; vLLM and numba read settings that `launch` makes first."""

ENVIRONMENT_WRITER = "deployments/vllm_exact/launch.py"
"""vLLM takes some settings from the environment only; this file writes them before vLLM is imported."""

DOTTED_PATH = re.compile(rf"(tailrace\.)?({'|'.join(CHAIN)})(\.[A-Za-z_]\w*)+(:\w+)?")
CONFIGURATION_KEY = re.compile(r"(policies|deployments)\.\w+")
"""Keys of the configuration look like dotted paths without `tailrace`."""


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def names_of(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


EVERY = names_of(sources(*CHAIN))


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(), name)


@cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def offences(names: list[str], found_in: Callable[[str], object]) -> dict[str, object]:
    """What a rule finds, by file. Of all files in one test: a thousand small tests took longer than their looks."""
    return {name: found for name in names if (found := found_in(name))}


@cache
def imports_of(tree: ast.Module) -> frozenset[str]:
    """Full names of all that a file imports, or names by dotted path in a string."""
    found = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED_PATH.fullmatch(node.value):
            found.add(node.value.replace(":", "."))
    return frozenset(found)


def ours_of(tree: ast.Module) -> set[str]:
    """Imports from the four folders, without the leading `tailrace.`."""
    return {name.removeprefix("tailrace.") for name in imports_of(tree) if name.startswith("tailrace.")}


def wrong_ways(name: str, tree: ast.Module) -> set[str]:
    """Imports to the right, of a file in one of the five folders."""
    rank = CHAIN.index(Path(name).parts[0])
    return {each for each in ours_of(tree) if each.split(".")[0] in CHAIN[rank + 1 :]}


def bare_imports(tree: ast.Module) -> set[str]:
    """Imports of a folder by its own name: the same file would be loaded twice, under two names."""
    found = {name for name in imports_of(tree) if name.split(".")[0] in CHAIN}
    return {name for name in found if not CONFIGURATION_KEY.fullmatch(name)}


def room_of(path: str) -> str:
    """The room of a file, or of a dotted import: its folder, at most two levels deep."""
    parts = path.removesuffix(".py").replace(".", "/").split("/")
    return next((room for room in ("/".join(parts[:2]), parts[0]) if room in ROOMS), parts[0])


def arrows() -> dict[tuple[str, str], set[str]]:
    """The files behind each arrow between two rooms of the product."""
    found: dict[tuple[str, str], set[str]] = {}
    for name in EVERY:
        for each in ours_of(tree_of(name)):
            if room_of(name) != room_of(each):
                found.setdefault((room_of(name), room_of(each)), set()).add(name)
    return found


def impurities(tree: ast.Module) -> set[str]:
    """What a policy must not use: modules beyond PURE, `hash()`, a generator, or another way to open something."""
    found = {name for name in imports_of(tree) if name.split(".")[0] not in PURE | {"tailrace"}}
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & {"hash", "open", "id", "eval", "exec", "__import__", "input", "print"}
        elif isinstance(node, ast.Attribute) and node.attr == "random":
            found.add("random")
    return found


def environment_uses(tree: ast.Module) -> list[str]:
    """`read` or `write` for each use of the environment."""
    stored = {
        id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    stored |= {id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Attribute) and node.attr == "update"}
    uses = []
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            uses += ["read" for alias in node.names if alias.name in ("environ", "environb", "getenv")]
        elif isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb"):
            uses.append("write" if id(node) in stored else "read")
    return uses


def beyond_the_simulator(name: str) -> set[str]:
    """Imports that a file of the simulator must not have. A driver's order of prompts is pure, and is simulated too."""
    found = ours_of(tree_of(name)) | {each for each in imports_of(tree_of(name)) if each.split(".")[0] in HEAVY}
    app = r"app\.(config|strict_yaml|calls\.length_order)"
    allowed = re.compile(rf"(policies|{app}|lab\.simulator|lab\.simulated_training)\b")
    return {each for each in found if not allowed.match(each)}


def loaded(*modules: str) -> dict[str, str]:
    """All that these import as they are loaded, ours in turn; by name, with the file that does."""
    found, left = {}, list(modules)
    while left:
        name = left.pop().removeprefix("tailrace.").replace(".", "/") + ".py"
        if name in EVERY:
            tops = [node for node in tree_of(name).body if isinstance(node, ast.Import | ast.ImportFrom)]
            new = {each: name for each in imports_of(ast.Module(tops, [])) if each not in found}
            found |= new
            left += [each for full in new for each in (full, full.rpartition(".")[0])]
    return found


def test_nothing_imports_to_the_right():
    assert offences(EVERY, lambda name: wrong_ways(name, tree_of(name))) == {}


def test_no_arrow_between_rooms_points_upwards():
    """And so none points both ways."""
    assert {room_of(name) for name in EVERY} == set(ROOMS)
    upwards = {pair: files for pair, files in arrows().items() if ROOMS.index(pair[1]) > ROOMS.index(pair[0])}
    assert upwards == {}


def test_every_file_imports_the_product_by_its_one_name():
    everywhere = [*EVERY, *names_of(sources("tests", "scripts", "examples"))]
    tests_of_imports = {"tests/house/test_imports.py", "tests/house/test_tiers.py"}
    assert offences([n for n in everywhere if n not in tests_of_imports], lambda n: bare_imports(tree_of(n))) == {}


def test_policies_are_pure():
    assert offences(names_of(sources("policies")), lambda name: impurities(tree_of(name))) == {}


def test_the_environment_is_read_in_app_alone():
    found = offences(names_of(sources(*CHAIN[:3])), lambda name: set(environment_uses(tree_of(name))))
    assert found == {ENVIRONMENT_WRITER: {"write"}}


def test_the_simulator_imports_policies_and_the_configuration_only():
    assert offences([name for name in EVERY if name.startswith("lab/simulat")], beyond_the_simulator) == {}


def test_policies_simulator_and_configuration_load_nothing_heavy():
    """By a fresh interpreter, so that what is imported in turn counts too."""
    light = [name for name in EVERY if re.match(r"(policies|lab/simulat|app/config)\b", name)]
    modules = ["tailrace." + name.removesuffix(".py").replace("/", ".") for name in light]
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
        ("policies/x.py", "import tailrace.kvpool.keys"),
        ("kvpool/x.py", "def f():\n    from tailrace.deployments.messages.chunk import ChunkRequest"),
        ("deployments/x.py", "import tailrace.app.build"),
        ("deployments/x.py", "WORKER = 'tailrace.app.build:build'"),
    ],
)
def test_a_wrong_import_is_found(name, source):
    assert wrong_ways(name, ast.parse(source))
    assert not wrong_ways("app/x.py", ast.parse(source))
    assert bare_imports(ast.parse(source.replace("tailrace.", "")))


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
