"""Three tiers by marker, run in this order: pure (no marker), live (Ray, vLLM, the demo model), gpu.

Tests marked `long`, `hosts`, `renderers` or `harnesses` are left out unless an option of that name is given. `make
test-long`, `test-hosts`, `test-renderers` and `test-harnesses` run them alone. Those marked `browser` or `traces` are
skipped where their tools are not.

Invariant: a pure test cannot import ray or vllm, whatever ran or was collected before it. Files under tests/live
are live as a whole and may import them at the top; elsewhere a live test imports them inside itself. Those under
tests/live/simulated start neither, and those under tests/live/engines and tests/live/trainers start no Ray. `make test`
runs two of each at a time, and then two folders or files of the other live ones, each on a Ray of its own: a service
waits for half of its start and its end. What was imported for the live tier (those packages, and our own modules that
came with them) is put aside in the pure one.
"""

import gc
import importlib.abc
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parent.parent
LIVE_FOLDER = ROOT / "tests" / "live"
TIERS = ("pure", "live", "gpu")
ON_REQUEST = {
    "long": "the tests marked `long`",
    "hosts": "the tests on hosts of their own (root)",
    "harnesses": "the tests of agents' harnesses, which have environments of their own",
    "renderers": "the tests of prime-rl's renderers and verifiers, which have an environment of their own",
}
HEAVY = {"ray", "vllm"}
OURS = {"tailrace"}

USUAL = gc.get_threshold()  # for trainers and engines, whose cycles hold tensors
SELDOM = (50_000, 10, 10)  # for trees of all files and simulations, as campaigns of the fuzz have it
MANY_MODULES = 100
gc.set_threshold(*SELDOM)

settings.register_profile("shared-cores", deadline=None)  # no timed assertions: a neighbour can slow any example
# For planted defects and mutants, where a failing example need not be the shortest.
settings.register_profile("unshrunk", deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
settings.load_profile("shared-cores")


class Guard(importlib.abc.MetaPathFinder):
    """While `closed`, importing a heavy package fails; `aside` keeps what only the live tier may see."""

    def __init__(self):
        self.closed = False
        self.pure_modules = set()
        self.aside = {}

    def find_spec(self, name, path=None, target=None):
        if self.closed and name.partition(".")[0] in HEAVY:
            raise ImportError(f"a pure test must not import {name}: mark it live and import inside it, or tests/live")

    def close(self):
        if not self.closed:
            watched = {name for name in sys.modules if name.partition(".")[0] in HEAVY | OURS}
            self.aside = {name: sys.modules.pop(name) for name in watched - self.pure_modules}
            self.closed = True

    def open(self):
        if self.closed:
            self.pure_modules = {name for name in sys.modules if name.partition(".")[0] in OURS}
            sys.modules.update(self.aside)
            self.closed = False


guard = Guard()
sys.meta_path.insert(0, guard)
guard.close()

from tailrace.policies.families.allowed_code import allow_code  # noqa: E402 - under the guard

allow_code(
    "user_policies", "test_lengths", "test_config", "no_such", "no_such_module", "nowhere"
)  # policies of tests, by dotted path


def tier_of(item) -> str:
    if item.get_closest_marker("gpu"):
        return "gpu"
    return "live" if item.get_closest_marker("live") or LIVE_FOLDER in item.path.parents else "pure"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    live = collector.path == LIVE_FOLDER or LIVE_FOLDER in collector.path.parents
    guard.open() if live else guard.close()
    report = yield
    report.result.sort(key=lambda node: node.path == LIVE_FOLDER)  # last, so that pure files see nothing of it
    return report


def pytest_addoption(parser):
    for marker, tests in ON_REQUEST.items():
        parser.addoption(f"--{marker}", action="store_true", help=f"run {tests}, too")


def pytest_configure(config):
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        guard.open()  # it runs no test, and reads classes of its workers' warnings


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`--dist loadgroup`: by folders and files, see folder_scheduling.py."""
    if config.getvalue("dist") == "loadgroup":
        from folder_scheduling import FolderScheduling

        return FolderScheduling(config, log)
    return None


def pytest_collection_modifyitems(config, items):
    for marker in ON_REQUEST:
        if not config.getoption(f"--{marker}"):
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(marker)])
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    for item in items:
        if tier_of(item) == "live":
            item.add_marker("live")
    items.sort(key=lambda item: TIERS.index(tier_of(item)))


class Imported:
    """Sets aside what has been imported, again after many more modules: full collections of garbage pass over it, for
    half a second each, and each run of the fuzz ends with one.
    """

    modules = 0

    def freeze(self):
        if len(sys.modules) > self.modules + MANY_MODULES:
            gc.collect()
            gc.freeze()
            self.modules = len(sys.modules)


imported = Imported()


def pytest_collection_finish():
    imported.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    tier = tier_of(item)
    guard.close() if tier == "pure" else guard.open()
    light = tier == "pure" or LIVE_FOLDER / "simulated" in item.path.parents
    gc.set_threshold(*(SELDOM if light else USUAL))
    if light:
        imported.freeze()
    if tier == "gpu":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; torch finds none")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The demo model's folder, made on first use. Live tests only: the conversion takes torch and half a minute."""
    from tailrace.app.model import resolve_model

    return resolve_model("demo")


@pytest.fixture(scope="session")
def trace_path() -> Path:
    """Recorded rollouts of AMC 2023 prompts, which lie beside the repository and not in it."""
    path = ROOT.parent / "shared" / "traces" / "amc23.jsonl.gz"
    if not path.is_file():
        pytest.skip("no recorded trace at ../shared/traces/amc23.jsonl.gz")
    return path
