"""Clients of slime, miles and AReaL, unmodified, against a gateway on this machine: `make test-sglang`.

Each generates, is interrupted by an update of weights from disk, goes on with its tokens, and ends. Tokens are compared
with those of `/inference/v1/generate` for the same names. The sources are checkouts that the caller gives; what they
import beyond this environment is in requirements.txt.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import httpx

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.model import perturbed, resolve_model
from tailrace.lab.benchmarks.http.servers import EngineShape, ours, tiny_model

SAMPLES = 4
TOKENS = 400
PROMPT = "The river rises in the mountains, and"


def expected(address: str, prompt: list[int], index: int, tokens: int, step: int = 0) -> list[int]:
    """Returns the tokens that vLLM's route gives under the same names."""
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": tokens, "seed": index}}
    headers = {"X-Tailrace-Step": str(step)}
    answer = httpx.post(f"{address}/inference/v1/generate", json=body, headers=headers, timeout=300)
    answer.raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


def slime(address: str, model: Path, other: Path) -> dict:
    """slime's rollout: whole and streamed samples, then its abort midway, its engine's update, and the rest."""
    from slime.backends.sglang_utils.external import discover_external_engines
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine
    from slime.rollout import sglang_rollout, sglang_streaming_rollout
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample

    (info,) = discover_external_engines([address])
    args = slime_args(model, info)
    init_http_client(args)
    engine = SGLangEngine(args, rank=0)
    engine.node_rank, engine.server_host, engine.server_port = 0, info.host, info.port
    state = sglang_rollout.GenerateState(args)
    ids = state.tokenizer.encode(PROMPT, add_special_tokens=False)

    def params(index: int, tokens: int) -> dict:
        return state.sampling_params | {"max_new_tokens": tokens, "sampling_seed": index}

    async def story() -> dict:
        whole, streamed = Sample(prompt=PROMPT), Sample(prompt=PROMPT)
        await sglang_rollout.generate(args, whole, params(1, 48))
        await sglang_streaming_rollout.generate_streaming(args, streamed, params(1, 48))
        assert whole.tokens == streamed.tokens == ids + await asyncio.to_thread(expected, address, ids, 1, 48)
        assert whole.rollout_log_probs == streamed.rollout_log_probs and whole.response == streamed.response
        cut = [Sample(prompt=PROMPT) for _ in range(SAMPLES)]
        calls = [
            asyncio.ensure_future(sglang_rollout.generate(args, sample, params(index, TOKENS)))
            for index, sample in enumerate(cut)
        ]
        state.pendings = set(calls)
        await asyncio.sleep(3)
        await sglang_rollout.abort(args, 0)
        await asyncio.gather(*calls)
        parts = [sample.response_length for sample in cut]
        statuses = sorted({sample.status.value for sample in cut})
        await asyncio.to_thread(engine.pause_generation)
        await asyncio.to_thread(engine.flush_cache)
        before = await asyncio.to_thread(engine.get_weight_version)
        await asyncio.to_thread(engine.update_weights_from_disk, str(other), None, str(int(before) + 1))
        await asyncio.to_thread(engine.continue_generation)
        after = await asyncio.to_thread(engine.get_weight_version)
        await asyncio.gather(
            *(sglang_rollout.generate(args, sample, params(index, TOKENS)) for index, sample in enumerate(cut))
        )
        assert all(len(sample.tokens) == len(ids) + sample.response_length for sample in cut)
        assert all(len(sample.rollout_log_probs) == sample.response_length for sample in cut)
        versions = sorted({version for sample in cut for version in sample.weight_versions if version})
        return {"interrupted_at": parts, "statuses": statuses, "versions": [before, after], "of_samples": versions}

    return asyncio.run(story())


def slime_args(model: Path, info) -> Namespace:
    """Returns slime's arguments with its defaults, as far as its rollout reads them."""
    return Namespace(
        hf_checkpoint=str(model), ci_test=False, sglang_server_concurrency=64, rollout_num_engines=1,
        rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1, rollout_max_response_len=TOKENS,
        rollout_stop=None, rollout_stop_token_ids=None, rollout_skip_special_tokens=False, rollout_seed=0,
        n_samples_per_prompt=SAMPLES, sglang_dp_size=1, sglang_router_ip=info.host, sglang_router_port=info.port,
        use_rollout_routing_replay=False, use_distributed_post=False, partial_rollout=False, rollout_external=True,
    )  # fmt: skip


def miles(address: str, model: Path, other: Path) -> dict:
    """miles' request and its reading of the answer."""
    from miles.rollout.generate_utils.generate_endpoint_utils import compute_request_payload
    from miles.rollout.generate_utils.generate_endpoint_utils import update_sample_from_response as read
    from miles.utils.types import Sample
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model).encode(PROMPT, add_special_tokens=False)
    args = Namespace(
        rollout_max_response_len=48, rollout_max_context_len=None, use_rollout_routing_replay=False,
        use_rollout_indexer_replay=False, lora_rank=0, lora_adapter_path=None, sglang_speculative_algorithm=None,
        num_layers=2,
    )  # fmt: skip
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 48, "no_stop_trim": True}
    payload, _ = compute_request_payload(args, ids, sampling | {"sampling_seed": 7})
    sample = Sample(prompt=PROMPT)
    asyncio.run(read(args, sample, payload, httpx.post(f"{address}/generate", json=payload, timeout=300).json()))
    assert sample.tokens == ids + expected(address, ids, 7, 48)
    return {"tokens": sample.response_length, "status": sample.status.value}


def areal(address: str, model: Path, other: Path) -> dict:
    """AReaL's engine: samples that an update of weights from disk interrupts, and that go on by themselves."""
    from areal.api import ModelRequest, WeightUpdateMeta
    from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
    from areal.engine.sglang_remote import RemoteSGLangEngine
    from areal.infra import workflow_context
    from areal.infra.utils.http import arequest_with_retry
    from transformers import AutoTokenizer

    engine = RemoteSGLangEngine(InferenceEngineConfig(backend="sglang:d1", max_concurrent_rollouts=SAMPLES))
    host = address.removeprefix("http://")
    engine.initialize("0", host, train_data_parallel_size=1)
    ids = AutoTokenizer.from_pretrained(model).encode(PROMPT, add_special_tokens=False)

    async def sent(request) -> dict:
        return await arequest_with_retry(host, request.endpoint, request.payload, method=request.method)

    async def story() -> dict:
        params = GenerationHyperparameters(max_new_tokens=TOKENS, max_tokens=2 * TOKENS, temperature=1.0)
        calls = [
            asyncio.ensure_future(engine.agenerate(ModelRequest(input_ids=list(ids), gconfig=params)))
            for _ in range(SAMPLES)
        ]
        await asyncio.sleep(3)
        backend = engine._engine.backend
        engine.workflow_executor.pause()
        await sent(backend.get_pause_request())
        disk = WeightUpdateMeta(type="disk", path=str(other))
        for request in backend.build_disk_weight_update_requests(disk).requests:
            updated = await sent(request)
        engine.set_version(engine.get_version() + 1)
        await sent(backend.get_resume_request())
        engine.workflow_executor.resume()
        answers = await asyncio.gather(*calls)
        assert all(one.input_tokens == ids for one in answers)
        assert all(len(one.output_tokens) == len(one.output_logprobs) for one in answers)
        await workflow_context.get_aiohttp_session()
        return {
            "updated": updated["success"],
            "tokens": [len(one.output_tokens) for one in answers],
            "of_the_first_version": [one.output_versions.count(0) for one in answers],
            "stop_reasons": sorted({one.stop_reason for one in answers}),
        }

    try:
        return asyncio.run(story())
    finally:
        engine.destroy()


CLIENTS: dict[str, Callable[[str, Path, Path], dict]] = {"slime": slime, "miles": miles, "areal": areal}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CLIENTS:
        parser.add_argument(f"--{name}", metavar="FOLDER", type=Path, help=f"a checkout of {name}")
    parser.add_argument("--json", action="store_true", help="one JSON object, the last line of stdout")
    given = {name: folder for name, folder in vars(parser.parse_args()).items() if name in CLIENTS and folder}
    if not given:
        parser.error("give one checkout or more")
    sys.path[:0] = [str(folder.resolve()) for folder in given.values()]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(resolve_model("demo"), Path(folder) / "model")
        other = perturbed(model, Path(folder) / "other", seed=2, scale=0.5)
        tokens = Path(folder) / "tokens"
        tokens.write_text("trainer anyone\n")
        file = load_config(DEFAULT_CONFIG.with_name("serve.http.yaml"))
        shape = EngineShape(model=model, max_running=16, max_model_len=2048)
        with ours(file, shape, GatewayConfig(tokens_file=str(tokens))) as address:
            for name in given:
                began = time.monotonic()
                found[name] = CLIENTS[name](address, model, other)
                print(f"{name}: {found[name]} in {time.monotonic() - began:.1f} s", file=sys.stderr)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
