"""Starts vLLM: its process-wide settings, its cores, its arguments.

Invariant: everything is set before vLLM is imported.
`vllm_args` cannot override an argument that the engine sets itself.
Called once per process, by the stepper or a draft model's sessions, on the thread that will step the engine.
On Linux, cores are bound per thread, and OpenMP's threads inherit the binding.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tailrace.deployments.messages.sampling import MAX_LOGPROBS
from tailrace.deployments.vllm_exact.attention import invariant_arguments
from tailrace.deployments.vllm_exact.engine_config import ASYNC, ROUTED_EXPERTS, SPECULATION, EngineConfig
from tailrace.deployments.vllm_exact.patches import make_llvmlite_scannable, verify_drafts_only
from tailrace.kvpool.keys import PREFIX, fingerprint
from tailrace.kvpool.pool_config import BUFFER_MIB, PoolEndpoint

WORKERS = {"cpu": "ExactCPUWorker", "gpu": "ExactGPUWorker"}
"""Names of the workers in worker.py, which vLLM imports by itself."""


MIN_ADAPTERS = 4
"""Number of adapter contents that an engine keeps by default: samples in flight continue with earlier ones."""


def core_ids(rank: int, cores: int, available: list[int]) -> list[int]:
    """Returns the `cores` cores of replica number `rank` on its node: disjoint until `available` is used up."""
    return [available[(rank * cores + i) % len(available)] for i in range(min(cores, len(available)))]


def bound_cores(config: EngineConfig, rank: int) -> tuple[int, ...]:
    """Returns the cores that replica number `rank` binds to; empty without a binding. The calling thread must not be
    bound."""
    if config.device != "cpu" or config.cores is None:
        return ()
    return tuple(core_ids(rank, config.cores * config.tensor_parallel, sorted(os.sched_getaffinity(0))))


def rebind(config: EngineConfig, old_rank: int, new_rank: int) -> None:
    """Moves this process's threads that are bound to one rank's cores to another rank's cores.

    For a replica whose rank Serve changes: Serve gives the lowest ranks to the remaining replicas.
    It gives their former ranks to new replicas, which would otherwise share a core with them.
    The calling thread must not be bound. Workers of tensor parallelism keep their cores.
    """
    if old_rank == new_rank or config.device != "cpu" or config.cores is None:
        return
    available, count = sorted(os.sched_getaffinity(0)), config.cores * config.tensor_parallel
    old, new = (set(core_ids(rank, count, available)) for rank in (old_rank, new_rank))
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended in the meantime
            if os.sched_getaffinity(thread) == old:
                os.sched_setaffinity(thread, new)


def launch(config: EngineConfig, rank: int, pool: PoolEndpoint | None = None, ahead: bool = False):
    """Starts vLLM's LLMEngine in this process (tensor-parallel workers are separate processes).

    `ahead`: with vLLM's asynchronous scheduler, see async_scheduling.py. vLLM's exceptions about a bad model folder
    pass through it. Raises ValueError on a reserved `vllm_args` key.
    """
    arguments = engine_arguments(config)
    cores = None
    if config.device == "cpu" and config.cores is not None:
        cores = core_ids(rank, config.cores * config.tensor_parallel, sorted(os.sched_getaffinity(0)))
    os.environ.update(process_settings(config, cores))
    if cores is not None:
        os.sched_setaffinity(0, cores)

    if config.device == "cpu":
        make_llvmlite_scannable()
    if cores is not None:
        limit_threads(max(1, len(cores) // config.tensor_parallel))
    if pool is None:
        engine = started(arguments, ahead)
    else:
        with pool_file(pool, config.device) as file:
            os.environ.update(pool_settings(pool, file))
            arguments["kv_transfer_config"] = transfer_config(config, pool)
            engine = started(arguments, ahead)
    if config.draft.drafts:
        verify_drafts_only(engine, proposes=config.vllm_drafter is not None)
        if config.model_runner == "v2" and config.vllm_drafter is None:
            engine.collective_rpc("propose_nothing")
    return engine


def started(arguments: dict, ahead: bool):
    """Returns vLLM's LLMEngine of these arguments of EngineArgs.

    `ahead` is set after vLLM's checks: they refuse asynchronous scheduling beside proposals from the host, which our
    steps wait for, and on every CPU.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    settings = EngineArgs(**arguments).create_engine_config()
    settings.scheduler_config.async_scheduling |= ahead
    return LLMEngine.from_vllm_config(settings, disable_log_stats=arguments["disable_log_stats"])


def limit_threads(count: int) -> None:
    """Lets torch and numba compute on `count` threads. Libraries that are loaded already do not read OMP_NUM_THREADS.

    numba comes first: as it starts its threads, it sets OpenMP's number, which is torch's too, to that of all cores.
    """
    import numba
    import torch

    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(count)


def process_settings(config: EngineConfig, cores: list[int] | None) -> dict[str, str]:
    """Returns environment variables for vLLM and the libraries below it."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process: quick start, no second hop
        "VLLM_USE_V2_MODEL_RUNNER": "1" if config.model_runner == "v2" else "0",
        "VLLM_CONFIGURE_LOGGING": "0",  # it would close Serve's log handler; a new controller then stops the replica
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # a model is a local folder; never wait for a hub
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",  # vLLM seeds its block hashes with it; they must agree between replicas
    }
    if config.device == "gpu":
        settings["VLLM_BATCH_INVARIANT"] = "1" if config.exactness == "bits" else "0"
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # V1 would import FlashInfer for a sampler that ours replaces
    if config.has_windows:
        settings["VLLM_CPU_ATTN_SPLIT_KV"] = "0"  # it would divide a context among cores, by the lengths of others
    if cores is not None:
        each = max(1, len(cores) // config.tensor_parallel)
        ranks = [cores[i : i + each] for i in range(0, len(cores), each)]
        # vLLM reads it for worker processes only; in one process the thread's own binding applies (vLLM 0.32).
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, ids)) for ids in ranks)
        settings["OMP_NUM_THREADS"] = str(each)
    return settings


def engine_arguments(config: EngineConfig) -> dict:
    """Returns keyword arguments for vLLM's EngineArgs."""
    ours = {
        "model": config.model,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_running + config.redraw_close_calls,  # a redraw is one more request, see `alone`
        "max_num_active_seqs": config.max_running,
        "max_num_batched_tokens": config.max_batched_tokens,
        "block_size": config.block_tokens,
        "tensor_parallel_size": config.tensor_parallel,
        "worker_cls": worker_of(config),
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "async_scheduling": False,  # see `started`
        "max_logprobs": MAX_LOGPROBS,
        "disable_log_stats": True,
        "mm_processor_cache_gb": 0,  # images come whole with their requests; 4 GiB would be kept of them
        "seed": 0,
    }
    if config.kv_cache_gib is not None:
        ours["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    if config.device == "cpu":
        ours["enforce_eager"] = True
    if config.draft.drafts:
        ours[SPECULATION] = speculative_config(config)
    if taken := sorted(ours.keys() & config.vllm_args.keys() - {ASYNC, SPECULATION}):
        raise ValueError(f"vllm_args.{taken[0]}: set by the engine's own configuration, not here")
    given = {key: value for key, value in config.vllm_args.items() if key not in (ROUTED_EXPERTS, ASYNC, SPECULATION)}
    if config.keeps_routes:
        given["additional_config"] = {**(given.get("additional_config") or {}), ROUTED_EXPERTS: True}
    return ours | given | attention_arguments(config) | adapter_arguments(given)


def worker_of(config: EngineConfig) -> str:
    """Returns the dotted path of the worker's class."""
    name = "WindowedCPUWorker" if config.has_windows else WORKERS[config.device]
    return f"tailrace.deployments.vllm_exact.worker.{name}"


def attention_arguments(config: EngineConfig) -> dict:
    """Returns the arguments that choose the attention backend: at `exactness: bits` on GPUs an invariant one, else
    vLLM's choice.
    """
    invariant = config.device == "gpu" and config.exactness == "bits"
    return invariant_arguments(config.vllm_args) if invariant else {}


def adapter_arguments(given: dict) -> dict:
    """Returns arguments that follow from others: more adapters are kept than can run, so one can be replaced."""
    if not given.get("enable_lora"):
        return {}
    return {"max_cpu_loras": max(given.get("max_cpu_loras") or MIN_ADAPTERS, given.get("max_loras", 1) + 1)}


def speculative_config(config: EngineConfig) -> dict:
    """Returns vLLM's speculative settings. vLLM verifies the drafts set on its requests, with any method.

    Without a drafter of vLLM's its first model runner gets one of ours, which proposes nothing. The second takes no
    class of ours, so it gets vLLM's n-gram lookup, which then proposes nothing.
    """
    most, own = {"num_speculative_tokens": config.draft_tokens}, config.vllm_drafter
    if own is None and config.model_runner == "v2":
        return most | {"method": "ngram", "prompt_lookup_max": 1, "prompt_lookup_min": 1}
    if own is None:
        return most | {"method": "custom_class", "model": "tailrace.deployments.vllm_exact.proposer.NoDrafts"}
    if config.model_runner == "v2":  # it captures its drafter's CUDA graphs for this many tokens
        most["num_speculative_tokens_per_batch_size"] = [[1, config.max_running, own["num_speculative_tokens"]]]
    return own | most


def cache_prefix(config: EngineConfig, pool: PoolEndpoint) -> str:
    """Returns the beginning of the keys of an engine's KV: engines share KV of one form, from one model, alone."""
    form = (config.dtype, config.block_tokens, config.tensor_parallel, pool.config.block_check, config.exactness)
    # As the type of the KV, or whether blocks have routes; the order of steps changes no KV.
    form += (sorted(repr(one) for one in config.vllm_args.items() if one[0] != ASYNC),)
    return f"{PREFIX}-{fingerprint(config.model, *form)}"


def transfer_config(config: EngineConfig, pool: PoolEndpoint):
    """Returns vLLM's KVTransferConfig: Tailrace's connector, its deadlines, a name space for this model only."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="PoolConnector",
        kv_connector_module_path="tailrace.kvpool.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "cache_prefix": cache_prefix(config, pool),
            "preferred_segment": pool.segment or None,
            "lookup_rpc_port": f"{os.getpid()}",  # two replicas on a node must not share vLLM's look-up socket
            "lookup_deadline_s": pool.config.lookup_deadline_s,
            "load_deadline_s": pool.config.load_deadline_s,
            "retry_s": pool.config.retry_s,
            "block_check": pool.config.block_check,
            "mac_key_file": pool.config.mac_key_file,
        },
    )


def pool_settings(pool: PoolEndpoint, file: str) -> dict[str, str]:
    """Returns environment variables of Mooncake's client in this process and its workers; `file`: see `pool_file`."""
    return {
        "MOONCAKE_CONFIG_PATH": file,
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": pool.host,
        "MC_TCP_BIND_ADDRESS": pool.host,
        "MC_LOG_LEVEL": "ERROR",  # at other levels Mooncake's client logs every connection
    }


@contextmanager
def pool_file(pool: PoolEndpoint, device: str) -> Iterator[str]:
    """Writes the JSON file that vLLM's Mooncake worker reads during construction; yields its path."""
    settings = {
        "mode": "standalone-store",  # memory of a replica would end with the replica
        "global_segment_size": 0,
        "local_buffer_size": (pool.config.buffer_mib or BUFFER_MIB[device]) << 20,
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": pool.master_address,
        "protocol": pool.config.protocol,
        "device_name": pool.config.rdma_devices,
        "enable_offload": pool.config.ssd_path is not None,
    }
    with tempfile.NamedTemporaryFile("w", prefix="tailrace-mooncake-", suffix=".json") as file:
        json.dump(settings, file)
        file.flush()
        yield file.name
