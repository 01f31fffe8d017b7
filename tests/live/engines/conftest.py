"""Models of these tests. One has few tokens: a row of the demo model's takes Triton's interpreter half a second."""

import asyncio
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from tiny_models import save_tiny

TEMPLATE = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning and loop.index0 > ns.last %}
{{- '<think>\\n' + m.reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- (m.content or '').lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Keeps thoughts after the last question of the user alone, as Qwen3's does."""


@pytest.fixture(scope="session")
def narrow_model(model_dir, tmp_path_factory) -> Path:
    """Folder of the tiny model with fewer tokens."""
    return save_tiny(model_dir, tmp_path_factory.mktemp("narrow") / "model", 2048)


@pytest.fixture(scope="session")
def thinking_tokenizer(model_dir, tmp_path_factory) -> Path:
    """Folder of the tokenizer and the configuration of a model that thinks; without weights."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("thinking")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    shutil.copy(model_dir / "config.json", folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _pinned(a_core_each):
    """Two processes of this folder's tests run side by side."""


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> Path:
    """Folder of a tiny model that takes images."""
    from image_model import make_image_model

    folder = tmp_path_factory.mktemp("images") / "model"
    make_image_model(folder)
    return folder


@pytest.fixture(scope="module")
def pool():
    """The endpoint of a pool that an engine waits for. A process can have one engine with a pool at a time: vLLM's
    socket for look-ups has the name of the process.
    """
    from tailrace.kvpool.pool_config import PoolConfig
    from tailrace.lab.benchmarks.pool.pool_testbed import running_pool

    started, ended = Future(), threading.Event()

    async def stay() -> None:
        # A pause of 1 s after saves that an error dropped would outlast the chunks of these models. KV that is late is
        # computed again, and on a busy machine any is.
        late = dict.fromkeys(("lookup_deadline_s", "load_deadline_s", "save_deadline_s"), 60)
        async with running_pool(PoolConfig(dram_gib=0.3, retry_s=0.005, **late)) as pool:
            started.set_result(pool.endpoint)
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(stay()), daemon=True)
    thread.start()
    yield started.result(timeout=60)
    ended.set()
    thread.join()
