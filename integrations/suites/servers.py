"""The two servers that a suite runs against, one after the other: the gateway, and `vllm serve` with the same model.

Invariant: the same model, length, dtype and blocks on both; what was started is stopped. For `suite.py`, `schema.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.model import resolve_model
from tailrace.lab.benchmarks.http.servers import EngineShape, ours, vllm

SERVERS = ("ours", "stock")
TOOL_PARSER = "hermes"


@contextmanager
def running(server: str, folder: Path, stock_flags: list[str], max_model_len: int = 8192) -> Iterator[tuple[str, Path]]:
    """Address and model folder of one of SERVERS. `folder`: for the log of `vllm serve`."""
    model = resolve_model("demo")
    shape = EngineShape(model=model, max_running=16, max_model_len=max_model_len, kv_cache_gib=1.0)
    if server == "stock":
        with vllm(shape, folder / "vllm-serve.log", tuple(stock_flags)) as address:
            yield address, model
        return
    file = load_config(DEFAULT_CONFIG.with_name("serve.http.yaml"))
    with ours(file, shape, GatewayConfig(tool_parser=TOOL_PARSER)) as address:
        yield address, model
