"""A pytest plugin: one outcome of each test against a running server, and a limit of time for each.

Invariant: a test passes, fails or is skipped with a reason; after the server gave no answer any more, no test runs. Run
by `suite.py`, with `--url`, `--model-name`, `--report FILE` and `--suite FILE`.
"""

import json
import re
import signal
import tomllib
from pathlib import Path

import httpx
import pytest
from comparison import LOST

TEST_S = 300
"""A test that takes longer has failed. The slowest ones that pass take a minute on a busy core."""


def pytest_addoption(parser):
    group = parser.getgroup("outcomes")
    group.addoption("--url", help="address of the server under test")
    group.addoption("--model-name", help="its model")
    group.addoption("--report", help="file for the outcomes, as JSON")
    group.addoption("--suite", help="file of the suite, as TOML")


def pytest_configure(config):
    if not config.getoption("--url"):
        raise pytest.UsageError("--url: give the address of a server, such as http://127.0.0.1:8000")
    config.pluginmanager.register(Outcomes(config), "outcomes-of-tests")


def pytest_collection_modifyitems(config, items):
    skipped = tomllib.loads(Path(config.getoption("--suite")).read_text())["skipped"]
    for item in items:
        for pattern, reason in skipped.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))


class TookTooLong(BaseException):
    """The time of a test is up. No `except Exception` of a test takes it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    def end(*_):
        raise TookTooLong(f"more than {TEST_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(TEST_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Outcomes:
    """One outcome of each test: passed, failed or skipped, and whether the server works after a failure."""

    def __init__(self, config):
        self.url, self.model = config.getoption("--url").rstrip("/"), config.getoption("--model-name")
        self.file = config.getoption("--report")
        self.found, self.lost = {}, False

    def works(self) -> bool:
        body = {"model": self.model, "prompt": [5, 6], "max_tokens": 1}
        try:
            return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    def pytest_runtest_logreport(self, report):
        known = self.found.setdefault(report.nodeid, {"outcome": "passed", "reason": "", "seconds": 0.0})
        known["seconds"] = round(known["seconds"] + report.duration, 2)
        if report.outcome != "passed" and known["outcome"] == "passed":
            known["outcome"] = report.outcome
            known["reason"] = said(report)
            if report.failed and not self.works():
                known["reason"] = f"{LOST}; {known['reason']}"
                self.lost = True
        if self.file and report.when == "teardown":
            Path(self.file).write_text(json.dumps(self.found, indent=1))
        if self.lost:
            pytest.exit("the server under test gives no answer any more", 1)

    def pytest_collectreport(self, report):
        if report.failed:
            self.found[report.nodeid] = {"outcome": "failed", "reason": f"not collected: {said(report)}", "seconds": 0}


def said(report) -> str:
    """The reason of a skip, or the lines of an error, in one."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    text = getattr(report.longrepr, "reprcrash", None)
    lines = text.message if text else str(report.longrepr)[-600:]
    where = "" if not text else f" ({Path(text.path).name}:{text.lineno})"
    return " ".join(lines.split())[:600] + where
