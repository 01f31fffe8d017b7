"""Which tests enter which functions, and how long each takes: measured once, in forked processes."""

import hashlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from mutants.mutant import ROOT
from mutants.planting import real


class TestRun(NamedTuple):
    """A test that passes: the functions that it entered, as `file function`, and its seconds."""

    __test__ = False
    test: str
    module: str
    seconds: float
    functions: frozenset[str]


def named(code: CodeType) -> str | None:
    """`file function` of a code object of the repository; a lambda's or a comprehension's is its function's."""
    path = real(code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    function = ".".join(part for part in code.co_qualname.split(".") if not part.startswith("<"))
    return f"{path.relative_to(ROOT)} {function}"


class Tracer:
    """Notes each code object that any thread enters."""

    def __init__(self):
        self._codes: dict[int, CodeType] = {}

    def _enter(self, frame, _event, _argument) -> None:
        self._codes[id(frame.f_code)] = frame.f_code

    def start(self) -> None:
        self._codes.clear()
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def stop(self) -> frozenset[str]:
        sys.settrace(None)
        threading.settrace(None)
        return frozenset(name for code in list(self._codes.values()) if (name := named(code)))


class Recorder:
    """A pytest plugin: traces each test. What a test's fixtures enter, each test of its module may rely on."""

    def __init__(self):
        self.runs: list[TestRun] = []
        self._tracer = Tracer()
        self._fixtures: dict[str, set[str]] = defaultdict(set)
        self._setup: frozenset[str] = frozenset()
        self._passed = False

    def run(self, items: Iterable) -> list[TestRun]:
        items = list(items)
        for item, following in zip(items, [*items[1:], None], strict=True):
            started, self._passed = time.monotonic(), False
            self._tracer.start()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            entered = self._tracer.stop()
            if self._passed:
                self._fixtures[str(item.path)] |= self._setup
                self.runs.append(
                    TestRun(item.nodeid, str(item.path), round(time.monotonic() - started, 4), entered | self._setup)
                )
        return [one._replace(functions=one.functions | self._fixtures[one.module]) for one in self.runs]

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "setup":
            self._setup = self._tracer.stop()
            self._tracer.start()
        if report.when == "call":
            self._passed = report.passed
        if report.failed:
            self._passed = False


class ReachFile:
    """What was measured of each module of tests, kept as long as the module's text stays."""

    def __init__(self, path: Path):
        self._path = path
        self._modules = json.loads(path.read_text()) if path.exists() else {}

    def known(self, module: str) -> bool:
        return self._modules.get(module, {}).get("digest") == digest(module)

    def runs(self, modules: Iterable[str]) -> list[TestRun]:
        rows = [row for module in modules for row in self._modules.get(module, {}).get("runs", ())]
        return [TestRun(*row[:3], frozenset(row[3])) for row in rows]

    def put(self, modules: Iterable[str], runs: Iterable[TestRun]) -> None:
        for module in modules:
            self._modules[module] = {"digest": digest(module), "runs": []}
        for one in runs:
            self._modules[one.module]["runs"].append([*one[:3], sorted(one.functions)])
        self._path.write_text(json.dumps(self._modules))


def digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def checks(runs: Iterable[TestRun], function: str, budget_s: float) -> list[TestRun]:
    """The tests that enter a function: the quickest ones, until their seconds reach the budget. Those of a module come
    together, as it shares its fixtures; the quickest module comes first."""
    chosen: dict[str, list[TestRun]] = defaultdict(list)
    spent = 0.0
    for one in sorted((one for one in runs if function in one.functions), key=lambda one: one.seconds):
        spent += one.seconds
        if spent > budget_s:
            break
        chosen[one.module].append(one)
    return [one for tests in sorted(chosen.values(), key=seconds_of) for one in tests]


def seconds_of(runs: Iterable[TestRun]) -> float:
    return sum(one.seconds for one in runs)
