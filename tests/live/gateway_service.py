"""A service of the tiny model with a gateway that wants tokens, for tests of its clients."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from waiting import until

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import DEFAULT_CONFIG, GatewayApplication, load_config, with_engine
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.deployments.staging.slots import service_name
from tailrace.kvpool.programs import free_port
from tailrace.policies.families.registry import Policies

PROMPT = (5, 300, 7, 41)
TOKENS = {"trainer": "trainer-" + "t" * 16, "evaluator": "evaluator-" + "e" * 16, "observer": "observer-" + "o" * 16}


FILE = DEFAULT_CONFIG.with_name("serve.http.yaml")


def usual_policies() -> Policies:
    """Those that the service starts with."""
    return load_config(FILE).application.policies


@contextmanager
def gateway(
    model: Path, folder: Path, vllm_args: dict | None = None, max_model_len: int = 512, **changes: int
) -> Iterator[tuple[str, RolloutClient]]:
    """Its address, and a client by Ray. `folder`: for the file of tokens. `changes`: of its GatewayConfig."""
    tokens = folder / "tokens"
    tokens.write_text("# of the tests\n" + "".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    port = free_port("127.0.0.1")  # of those that no process is given unasked while the service starts
    settings = {"model": str(model), "kv_cache_gib": 0.25, "max_model_len": max_model_len, "vllm_args": vllm_args or {}}
    file = with_engine(load_config(FILE), settings)
    usual = {"max_body_bytes": 20_000, "tool_parser": "hermes", "port": port}
    config = GatewayConfig(tokens_file=str(tokens), **(usual | changes))
    application = GatewayApplication(args=config)
    with service(file.model_copy(update={"applications": (file.application, application)}), None) as client:
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_healthy(url))
        yield url, client


def is_healthy(url: str) -> bool:
    """Whether the gateway answers that it is; it starts beside the service, not before it."""
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def slots_service() -> str:
    """The name of the slots of the service that this process is connected to."""
    import ray  # here, since a conftest that is named on the command line is loaded under the guard

    return service_name(load_config(FILE).application.name, ray.get_runtime_context().gcs_address)


def slots(service: str) -> list[str]:
    """A service's weights in this machine's shared memory, by the names of their folders."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"tailrace-{service}*"))


def caller(url: str, role: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKENS[role]}"}, timeout=300)


def asked(http: httpx.Client, index: int, **changes) -> dict:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 24, "logprobs": 1}} | changes
    headers = {"X-Tailrace-Seed": "9", "X-Tailrace-Group": "g", "X-Tailrace-Index": str(index)}
    answer = http.post("/inference/v1/generate", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()
