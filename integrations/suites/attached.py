"""A pytest plugin: vLLM's tests of its OpenAI server against a server that runs already.

Invariant: no test starts a server or asks a hub; each has an outcome, and if it is skipped a reason. Run by `suite.py`,
in a folder that `workspace.py` has made, with `--report FILE` for the outcomes.
"""

import inspect
import json
import signal
import tomllib
from pathlib import Path

import httpx
import openai
import pytest
import tests.tool_use.utils as tool_configs
import tests.utils
import vllm.transformers_utils.repo_utils as hub
from server_flags import missing

SUITE = tomllib.loads((Path(__file__).parent / "suite.toml").read_text())
TEST_S = 180
"""A test that takes longer has failed. The slowest one that passes takes about 20 s on one core."""

REQUEST_S = 60.0


def pytest_addoption(parser):
    group = parser.getgroup("attached")
    group.addoption("--url", help="address of the server under test")
    group.addoption("--model-name", help="its model")
    group.addoption("--report", help="file for the outcomes, as JSON")


class AttachedServer:
    """In place of vLLM's RemoteOpenAIServer: the address of the server under test."""

    DUMMY_API_KEY = "token-abc123"
    url_root = ""
    uds = None
    show_hidden_metrics = False

    def __init__(self, model: str, vllm_serve_args: list[str] = (), **settings):
        if lacking := missing(list(vllm_serve_args), SUITE):
            pytest.skip(f"needs a server with {' '.join(lacking)}")
        if changes := settings.get("override_hf_configs") or settings.get("env_dict"):
            pytest.skip(f"needs a server with {changes}")
        self.host, _, port = self.url_root.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def settings(self, given: dict) -> dict:
        usual = {"timeout": REQUEST_S, "max_retries": 0, "api_key": self.DUMMY_API_KEY}
        return {"base_url": self.url_for("v1")} | usual | given

    def get_client(self, **given):
        return openai.OpenAI(**self.settings(given))

    def get_async_client(self, **given):
        return openai.AsyncOpenAI(**self.settings(given))


class NoHub:
    """In place of the hub's API: an adapter's folder is only named to a server, and none is started."""

    def snapshot_download(self, repo_id: str, **_) -> str:
        return repo_id


# As this plugin is imported, and so before a test's module is.
tests.utils.RemoteOpenAIServer = AttachedServer
hub.hf_api = NoHub
for other in set(tool_configs.CONFIGS) - {"hermes"}:
    del tool_configs.CONFIGS[other]
tool_configs.CONFIGS["hermes"]["arguments"] = []


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    return "qwen3-lora"


def pytest_configure(config):
    if not config.getoption("--url"):
        raise pytest.UsageError("--url: give the address of a server, such as http://127.0.0.1:8000")
    AttachedServer.url_root = config.getoption("--url").rstrip("/")
    tool_configs.CONFIGS["hermes"]["model"] = config.getoption("--model-name")
    config.pluginmanager.register(Outcomes(config), "outcomes")


def asks_server(item) -> bool:
    """Whether the test uses a server; the others are of vLLM's own objects, which are the same for both servers."""
    used = any(word in name for name in item.fixturenames for word in ("server", "client"))
    return used or "RemoteOpenAIServer" in inspect.getsource(item.function)


def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=[item for item in items if not asks_server(item)])
    items[:] = [item for item in items if asks_server(item)]
    for item in items:
        for words, reason in SUITE["skipped"].items():
            if words in item.nodeid:
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
        self.file, self.model = config.getoption("--report"), config.getoption("--model-name")
        self.found, self.lost = {}, False

    def works(self) -> bool:
        body = {"model": self.model, "prompt": [5, 6], "max_tokens": 1}
        try:
            return httpx.post(f"{AttachedServer.url_root}/v1/completions", json=body, timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    def pytest_runtest_logreport(self, report):
        known = self.found.setdefault(report.nodeid, {"outcome": "passed", "reason": "", "seconds": 0.0})
        known["seconds"] = round(known["seconds"] + report.duration, 2)
        if report.outcome != "passed" and known["outcome"] == "passed":
            known["outcome"] = report.outcome
            known["reason"] = said(report)
            if report.failed and not self.works():
                known["reason"] = f"THE SERVER GIVES NO ANSWER ANY MORE; {known['reason']}"
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
