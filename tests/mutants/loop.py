"""A pytest plugin in the place of its loop: each mutant is planted in a fork of the process that has collected."""

import json
import os
import resource
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from mutants.forks import forked
from mutants.mutant import Mutant
from mutants.planting import plant
from mutants.reach import ReachFile, Recorder, TestRun, checks

TEST_LIMIT_S = 10.0
"""A test hangs that takes 5 times its seconds and this."""
MORE_BYTES = 4 << 30
"""A process with a mutant may take so much more memory."""
MEASURE_LIMIT_S = 1800.0


class MutantLoop:
    """`note`: called with each mutant, its state, the test that found it, and seconds."""

    def __init__(
        self,
        wanted: list[Mutant],
        reach: ReachFile,
        jobs: int,
        budget_s: float,
        note: Callable[[Mutant, str, str, float], None],
    ):
        self._wanted = wanted
        self._reach = reach
        self._jobs = jobs
        self._budget_s = budget_s
        self._note = note
        self._items: dict[str, pytest.Item] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        found: dict[str, list[tuple[Mutant, float]]] = defaultdict(list)
        for mutant, text, seconds in forked(self._tasks(self._measured(session)), self._jobs):
            if not text:
                raise RuntimeError(f"{mutant.key}: planting ended without an answer")
            state, by = json.loads(text)
            self._note(mutant, state, by, seconds)
            if by in self._items:
                found[by].append((mutant, seconds))
        alone = [(test, partial(self._alone, test), MEASURE_LIMIT_S) for test in found]
        for test, text, _ in forked(alone, self._jobs):
            if not text or json.loads(text)[0] == "found":
                for mutant, seconds in found[test]:
                    self._note(mutant, "unsure", f"{test} fails without it, too", seconds)
        return True

    def _measured(self, session) -> list[TestRun]:
        modules = defaultdict(list)
        for item in session.items:
            modules[str(item.path)].append(item)
        new = [module for module in modules if not self._reach.known(module)]
        works = [
            (part, partial(measure, session.config, [item for module in part for item in modules[module]]))
            for number in range(self._jobs)
            if (part := new[number :: self._jobs])
        ]
        for part, text, _ in forked([(part, work, MEASURE_LIMIT_S) for part, work in works], self._jobs):
            if not text:
                raise RuntimeError("the tests without a mutant came to no end")
            self._reach.put(part, [TestRun(*row[:3], frozenset(row[3])) for row in json.loads(text)])
        return [one for one in self._reach.runs(modules) if one.test in self._items]

    def _tasks(self, runs: list[TestRun]) -> Iterator[tuple[Mutant, Callable[[Path], None], float]]:
        for mutant in self._wanted:
            chosen = checks(runs, f"{mutant.file} {mutant.function}", self._budget_s)
            if not chosen:
                self._note(mutant, "unreached", "", 0.0)
                continue
            limit_s = sum(5 * one.seconds + 1 for one in chosen) + 6 * TEST_LIMIT_S
            tests = [(self._items[one.test], one.seconds) for one in chosen]
            yield mutant, partial(self._check, mutant, tests), limit_s

    def _check(self, mutant: Mutant, tests: list[tuple[pytest.Item, float]], answer: Path) -> None:
        bound_memory()
        if plant(mutant):
            answer.write_text(json.dumps(["found", "it ends the process, or never ends"]))
            first_failure(tests, answer)
        else:
            answer.write_text(json.dumps(["unplanted", ""]))

    def _alone(self, test: str, answer: Path) -> None:
        first_failure([(self._items[test], MEASURE_LIMIT_S)], answer)


def first_failure(tests: list[tuple[pytest.Item, float]], answer: Path) -> None:
    """Run tests, each with the seconds that it takes, until one fails; the answer names it."""
    first = FirstFailure(answer)
    tests[0][0].config.pluginmanager.register(first)
    for (item, seconds), (following, _) in zip(tests, [*tests[1:], (None, 0)], strict=True):
        first.watch(item.nodeid, 5 * seconds + TEST_LIMIT_S)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    signal.setitimer(signal.ITIMER_REAL, 0)
    answer.write_text(json.dumps(["survived", f"{len(tests)} tests"]))


class FirstFailure:
    """A pytest plugin: writes down the first test that fails or hangs, and ends the process."""

    def __init__(self, answer: Path):
        self._answer = answer
        self._test = ""

    def watch(self, test: str, limit_s: float) -> None:
        self._test = test
        signal.signal(signal.SIGALRM, lambda *_: self._end(f"{self._test} hangs"))
        signal.setitimer(signal.ITIMER_REAL, limit_s)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self._end(report.nodeid)

    def _end(self, by: str) -> None:
        self._answer.write_text(json.dumps(["found", by]))
        os._exit(0)


def measure(config, items: list[pytest.Item], answer: Path) -> None:
    recorder = Recorder()
    config.pluginmanager.register(recorder)
    rows = [[*one[:3], sorted(one.functions)] for one in recorder.run(items)]
    answer.write_text(json.dumps(rows))


def bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
