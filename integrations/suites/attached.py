"""A pytest plugin: vLLM's tests of its OpenAI server against a server that runs already.

Invariant: no test starts a server or asks a hub; one whose server needs flags that neither server has is skipped. For
`suite.py`, with the plugin `outcomes`, in a folder that `workspace.py` has made.
"""

import inspect
import tomllib
from functools import wraps
from pathlib import Path

import openai
import pytest
import tests.tool_use.utils as tool_configs
import tests.utils
import vllm.transformers_utils.repo_utils as hub
from openai.resources.chat.completions import AsyncCompletions, Completions
from server_flags import missing

SUITE = tomllib.loads((Path(__file__).parent / "vllm.toml").read_text())
REQUEST_S = 120.0
CHAT_TOKENS = 256
"""Of a chat that names no limit: the demo model talks up to its context, for minutes on a CPU."""


class AttachedServer:
    """In place of vLLM's RemoteOpenAIServer: the address of the server under test."""

    DUMMY_API_KEY = "token-abc123"
    url_root = ""
    uds = None
    show_hidden_metrics = False

    def __init__(self, model: str, vllm_serve_args: list[str] = (), **settings):
        if lacking := missing(list(vllm_serve_args), SUITE):
            pytest.skip(f"needs a server with {' '.join(lacking).replace(f'{Path.cwd()}/', '')}")
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


def limited(create):
    """The client's call, whose answer has at most CHAT_TOKENS tokens if the test names no limit."""

    @wraps(create)
    def call(self, **given):
        if given.get("max_tokens") is None and given.get("max_completion_tokens") is None:
            given["max_completion_tokens"] = CHAT_TOKENS
        return create(self, **given)

    return call


class NoHub:
    """In place of the hub's API: an adapter's folder is only named to a server, and none is started."""

    def snapshot_download(self, repo_id: str, **_) -> str:
        return repo_id


# As this plugin is imported, and so before a test's module is.
tests.utils.RemoteOpenAIServer = AttachedServer
hub.hf_api = NoHub
for chats in (Completions, AsyncCompletions):
    chats.create = limited(chats.create)
for other in set(tool_configs.CONFIGS) - {"hermes"}:
    del tool_configs.CONFIGS[other]
tool_configs.CONFIGS["hermes"]["arguments"] = []


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    return "qwen3-lora"


def pytest_configure(config):
    AttachedServer.url_root = config.getoption("--url").rstrip("/")
    tool_configs.CONFIGS["hermes"]["model"] = config.getoption("--model-name")


def asks_server(item) -> bool:
    """Whether the test uses a server; the others are of vLLM's own objects, which are the same for both servers."""
    used = any(word in name for name in item.fixturenames for word in ("server", "client"))
    return used or "RemoteOpenAIServer" in inspect.getsource(item.function)


def pytest_collection_modifyitems(config, items):
    config.hook.pytest_deselected(items=[item for item in items if not asks_server(item)])
    items[:] = [item for item in items if asks_server(item)]
