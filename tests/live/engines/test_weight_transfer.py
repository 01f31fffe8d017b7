"""A transfer engine of vLLM's kind fills a slot beside the running model, which changes at the commit alone.

`nccl` and `ipc` need a GPU: their tests are marked so. Here an engine for CPUs has their place in vLLM's registry.
"""

import asyncio
import os
from dataclasses import dataclass
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from tailrace.app.model import perturbed
from tailrace.deployments.coordinator.weight_transfer import WeightTransfer
from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.command import LoadWeights, TransferWeights
from tailrace.deployments.messages.rollout import Rejected, SamplingParams
from tailrace.deployments.messages.transfer import Transfer, TransferPhase
from tailrace.deployments.staging.slots import Slots, memory_source, slot_of
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

SERVICE = f"transfer-test-{os.getpid()}"


@dataclass
class FileInit(WeightTransferInitInfo):
    folder: str


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    names: list[str]


class FileTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Receives tensors from a file, as others do from a GPU."""

    init_info_cls, update_info_cls = FileInit, FileUpdate

    def init_transfer_engine(self, init_info):
        self.folder = init_info.folder

    def start_weight_update(self):
        raise AssertionError("the model is not reloaded by a transfer")

    finish_weight_update = start_weight_update

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))  # vLLM's own waits for an accelerator

    def receive_weights(self, update_info):
        found = load_file(f"{self.folder}/model.safetensors")
        self.model.load_weights([(name, found[name]) for name in update_info.names])

    def shutdown(self):
        pass


WeightTransferEngineFactory.register_engine("file", FileTransferEngine)


@pytest.fixture(scope="module")
def other(tiny_model, tmp_path_factory):
    return perturbed(tiny_model, tmp_path_factory.mktemp("other") / "weights", scale=0.5)


@pytest.fixture(scope="module")
def engine(tiny_model):
    args = {"weight_transfer_config": {"backend": "file"}}
    config = EngineConfig(model=str(tiny_model), max_model_len=256, kv_cache_gib=0.25, vllm_args=args)
    engine = EngineRunner(config, "one")
    yield engine
    engine.stop()
    Slots(SERVICE).remove()


def tokens(engine, version: int) -> list[int]:
    results, done = [], Event()
    chunk = ChunkRequest(
        chunk_id=f"c{version}",
        sample_key=sample_key(0, 0, "p", 0),
        token_ids=np.arange(10, 30, dtype=np.int32),
        prompt_tokens=20,
        max_tokens=16,
        sampling=SamplingParams(),
        weights_version=version,
    )
    engine.submit(chunk, lambda result: (results.append(result), done.set()))
    assert done.wait(120)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0].token_ids.tolist()


def take(engine, phase: TransferPhase, info=None) -> str:
    transfer = Transfer(phase=phase, info=info, version=1, served=(0, ""), service=SERVICE)
    return engine.ask(TransferWeights(transfer)).result(timeout=120)


def test_received_weights_change_the_model_at_the_commit_alone(engine, other):
    before = tokens(engine, 0)
    names = sorted(load_file(other / "model.safetensors"))
    take(engine, TransferPhase.INIT, {"folder": str(other)})
    take(engine, TransferPhase.START)
    take(engine, TransferPhase.PART, {"names": names[:3]})
    with pytest.raises(ValueError, match="KeyError: 'no such tensor'"):
        take(engine, TransferPhase.PART, {"names": ["no such tensor"]})
    assert engine.healthy and tokens(engine, 0) == before
    take(engine, TransferPhase.START)  # the trainer begins again
    for name in names:
        take(engine, TransferPhase.PART, {"names": [name]})
    source = take(engine, TransferPhase.FINISH)
    assert tokens(engine, 0) == before and slot_of(memory_source(source)) is not None
    engine.ask(LoadWeights(1, source, memory_source(source).digest)).result(timeout=120)
    from_memory = tokens(engine, 1)
    engine.ask(LoadWeights(2, str(other))).result(timeout=120)
    assert tokens(engine, 2) == from_memory != before
    with pytest.raises(ValueError, match="no tensor was received"):
        take(engine, TransferPhase.FINISH)
    assert take(engine, TransferPhase.SHUTDOWN) == ""


class Replicas:
    """Engines by name; each notes the transfers that it takes."""

    def __init__(self, *names, sources=()):
        self.reports = {name: SimpleNamespace(node_id=f"node-{name[0]}", weight_transfer="ipc") for name in names}
        self.taken, self.sources, self.fails = [], dict(sources), ""

    async def ask(self, name, command):
        transfer = command.transfer
        self.taken.append((name, transfer))
        if name == self.fails:
            raise RuntimeError("out of memory")
        return self.sources.get(name, "") if transfer.phase is TransferPhase.FINISH else ""


def phases(replicas, *wanted):
    transfer = WeightTransfer(replicas, lambda: replicas.reports, lambda: (4, "digest"))

    async def run():
        return [await transfer.run(phase, info) for phase, info in wanted]

    return asyncio.run(run())[-1]


def test_each_replica_has_its_ranks_and_each_node_one_writer():
    replicas = Replicas("a1", "a2", "b1", sources={"a1": "memory:x", "b1": "memory:x"})
    assert phases(replicas, ("init", {"master_address": "h"})).reason == (
        "a1 has no transfer engine nccl: give its engine vllm_args: {weight_transfer_config: {backend: nccl}}"
    )
    for report in replicas.reports.values():
        report.weight_transfer = "nccl"
    info = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 7}
    assert phases(replicas, ("init", info), ("start", None), ("finish", None)) == "memory:x"
    assert [t.info["rank_offset"] for _, t in replicas.taken[:3]] == [1, 3, 5]
    finish = {name: t.phase for name, t in replicas.taken[-3:]}
    assert finish == {"a1": TransferPhase.FINISH, "a2": TransferPhase.DROP, "b1": TransferPhase.FINISH}
    assert {(t.version, t.served) for _, t in replicas.taken} == {(5, (4, "digest"))}


def test_a_transfer_without_all_its_replicas_is_refused_before_it_hangs():
    replicas = Replicas("a1", "a2")
    assert isinstance(phases(replicas, ("start", None)), Rejected)
    transfer = WeightTransfer(replicas, lambda: replicas.reports, lambda: (0, ""))

    async def run():
        assert await transfer.run("init", {"packed": True}) == ""
        del replicas.reports["a2"]
        return await transfer.run("start", None)

    assert asyncio.run(run()).reason == "the replicas are not those that `init` found: 1 now; init again"


def test_a_failed_phase_names_the_replica_and_two_contents_are_refused():
    replicas = Replicas("a1", "b1", sources={"a1": "memory:x", "b1": "memory:y"})
    assert (
        "different weights: memory:x, memory:y"
        in phases(replicas, ("init", {}), ("start", None), ("finish", None)).reason
    )
    replicas.fails = "b1"
    assert (
        phases(replicas, ("init", {})).reason == "init of a weight transfer failed on b1: RuntimeError: out of memory"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_vllms_own_transfer_engines_bring_weights_to_a_gpu_service(tiny_model, other, backend):
    """One GPU for trainer and engine with `ipc`; `nccl` wants one GPU each."""
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_open_port

    from tailrace.app.cluster import service
    from tailrace.app.config import load_config, with_engine
    from tailrace.app.weights.receiver import weights_receiver
    from tailrace.deployments.replica_count import fixed

    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("nccl needs a GPU for the trainer and one for the engine")
    args = {"weight_transfer_config": {"backend": backend}, "gpu_memory_utilization": 0.5}
    changes = {"model": str(tiny_model), "device": "gpu", "max_model_len": 512, "kv_cache_gib": 0.25, "vllm_args": args}
    file = with_engine(load_config(), changes)
    file = file.model_copy(update={"applications": (file.application.with_args(replicas=fixed(1)),)})
    with service(file, None) as client:
        device = "cuda:0" if backend == "ipc" else "cuda:1"
        model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).to(device)
        torch.cuda.set_device(device)
        info = (
            IPCTrainerInitInfo(rank=0)
            if backend == "ipc"
            else NCCLTrainerInitInfo("127.0.0.1", get_open_port(), 2, rank=0)
        )
        sync = RayVLLMWeightSyncClient(weights_receiver(client.app_name))
        engine = WeightTransferTrainerFactory.trainer_init(info, client=sync, source=ModuleSource(model))
        engine.send_weights()
        status = client.status_blocking()
        assert status.weights_version == 1 and status.weights_source.startswith("memory:")
