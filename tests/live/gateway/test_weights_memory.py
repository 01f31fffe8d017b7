"""Weights from memory, on a real service of two replicas: as from a folder to the token, and never by halves."""

import asyncio
import json
import os

import numpy as np
import pytest
from gateway_service import slots, slots_service
from safetensors.numpy import load_file

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import WeightsRejected
from tailrace.app.model import perturbed
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.lab.verification.disturbances import kill_actors

GROUPS = tuple(
    PromptGroup(prompt_id=str(i), text=text, samples=2, max_tokens=24)
    for i, text in enumerate(("Count to three:", "Name a colour:", "Say a word:"))
)


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory):
    """Two other sets of weights, as folders."""
    root = tmp_path_factory.mktemp("others")
    return [perturbed(tiny_model, root / str(seed), seed=seed, scale=0.5) for seed in (1, 2)]


def tensors_of(folder) -> dict:
    return load_file(folder / "model.safetensors")


def run(work):
    return asyncio.run(asyncio.wait_for(work, 600))


def version_of(client: RolloutClient) -> int:
    return client.status_blocking().weights_version


def roll(client: RolloutClient, name: str) -> dict:
    groups = client.rollout_blocking(RolloutBatch(batch_id=name, groups=GROUPS))
    return {group.prompt_id: [sample.token_ids for sample in group.samples] for group in groups}


def versions(client: RolloutClient, name: str) -> set:
    groups = client.rollout_blocking(RolloutBatch(batch_id=name, groups=GROUPS))
    return {(s.replica_id, s.weights_version) for g in groups for sample in g.samples for s in sample.segments}


async def both_on(client: RolloutClient, version: int) -> set[str]:
    """Replica ids, once two are ready under the version."""
    while True:
        ready = [r for r in (await client.status()).replicas if r.ready and r.weights_version == version]
        if len(ready) == 2:
            return {replica.replica_id for replica in ready}
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def spoken(client, folders):
    """Tokens under the weights of each folder, loaded from there."""
    said = []
    for folder in folders:
        client.update_weights_blocking(version_of(client) + 1, str(folder))
        said.append(roll(client, f"folder-{folder.name}"))
    assert said[0] != said[1]
    return said


def test_memory_equals_the_folder_to_the_token(client, folders, spoken):
    for turn in range(4):  # more than there are slots
        loaded = client.send_weights_blocking(version_of(client) + 1, tensors_of(folders[turn % 2]))
        assert len(loaded.replicas) == 2 == len(loaded.paused_s) and loaded.staged_s > 0
        assert min(loaded.paused_s.values()) > 0
        assert roll(client, f"memory-{turn}") == spoken[turn % 2]


def test_tensors_may_change_once_they_are_staged(client, folders, spoken):
    tensors = tensors_of(folders[0])
    staged = client.stage_weights_blocking(version_of(client) + 1, iter(tensors.items()))
    for tensor in tensors.values():
        tensor[:] = 7
    before = version_of(client)
    loaded = client.commit_weights_blocking(staged)
    assert loaded.version == before + 1 and roll(client, "changed") == spoken[0]


def absent(tensors):
    del tensors["model.norm.weight"]


def extra(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


def shape(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


def kind(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)


def not_a_number(tensors):
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)


REFUSED = {
    absent: "no tensor model.norm.weight, which the running model has",
    extra: "the running model has no tensor lm_head.weight",
    shape: r"model.norm.weight is float \(127,\), in the running model float \(128,\)",
    kind: r"model.norm.weight is I8",
    not_a_number: "model.norm.weight has a value that is not a finite number",
}


@pytest.mark.parametrize("spoil", REFUSED)
def test_weights_that_do_not_fit_leave_the_former_ones_serving(client, folders, spoken, spoil):
    client.send_weights_blocking(version := version_of(client) + 1, tensors_of(folders[1]))
    tensors = tensors_of(folders[0])
    spoil(tensors)
    with pytest.raises(WeightsRejected, match=f"weights memory:.*{REFUSED[spoil]}") as refused:
        client.send_weights_blocking(version + 1, tensors)
    assert "\n" not in str(refused.value)
    assert version_of(client) == version and roll(client, f"refused-{spoil.__name__}") == spoken[1]
    client.send_weights_blocking(version + 1, tensors_of(folders[0]))  # the same number, other content
    assert roll(client, f"mended-{spoil.__name__}") == spoken[0]


def test_a_byte_that_changed_in_memory_is_refused(client, folders, spoken):
    client.send_weights_blocking(version := version_of(client) + 1, tensors_of(folders[1]))
    staged = client.stage_weights_blocking(version + 1, tensors_of(folders[0]))
    source = staged.stage.seal()
    (folder,) = (f for name, f in staged.stage._slots.held().items() if name == (source.version, source.digest))
    path = folder / "model-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(WeightsRejected, match="has another checksum than when it was staged"):
        client.update_weights_blocking(version + 1, str(source), source.digest)
    assert version_of(client) == version and roll(client, "flipped") == spoken[1]


def test_a_stage_that_is_given_up_changes_nothing(client, folders, spoken):
    client.send_weights_blocking(version := version_of(client) + 1, tensors_of(folders[1]))

    def broken():
        yield from list(tensors_of(folders[0]).items())[:3]
        raise KeyboardInterrupt("the trainer was stopped")

    with pytest.raises(KeyboardInterrupt):
        client.stage_weights_blocking(version + 1, broken())
    assert version_of(client) == version and roll(client, "given-up") == spoken[1]
    assert not any(name.endswith("-part") for name in slots(slots_service()))


def test_a_killed_replica_comes_back_on_the_version_in_memory(client, folders, spoken):
    client.send_weights_blocking(version := version_of(client) + 1, tensors_of(folders[0]))
    before = run(both_on(client, version))
    assert kill_actors(min(before)) == 1

    async def replaced():
        while (now := await both_on(client, version)) == before:
            await asyncio.sleep(0.1)
        return now

    now = run(replaced())
    assert now != before and roll(client, "late") == spoken[0]
    assert {v for _, v in versions(client, "late-versions")} == {version}


def test_a_new_coordinator_keeps_the_version_in_memory(client, folders, spoken):
    client.send_weights_blocking(version := version_of(client) + 1, tensors_of(folders[1]))
    assert kill_actors("#Coordinator#") == 1
    assert roll(client, "restarted") == spoken[1]
    status = client.status_blocking()
    assert status.weights_version == version and status.weights_source.startswith("memory:")
    run(both_on(client, version))
    client.send_weights_blocking(version + 1, tensors_of(folders[0]))
    assert roll(client, "restarted-on") == spoken[0]


def test_vllms_own_trainer_engine_and_client_drive_the_service(client, folders, spoken):
    import ray
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from tailrace.app.weights.receiver import weights_receiver
    from tailrace.app.weights.trainer_engine import MemoryTrainerInitInfo, register

    register()
    register()
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    receiver, version = weights_receiver(client.app_name), version_of(client)
    sync = RayVLLMWeightSyncClient(receiver)
    with pytest.raises(Exception, match="start_weight_update before init_weight_transfer_engine"):
        sync.start_weight_update()
    info = MemoryTrainerInitInfo(rank=0, app_name=client.app_name)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=sync, source=ModuleSource(model))
    engine.send_weights()
    assert version_of(client) == version + 1 and roll(client, "vllm") == spoken[1]
    sync.start_weight_update()
    with pytest.raises(Exception, match="finish_weight_update without update_weights"):
        sync.finish_weight_update()
    assert version_of(client) == version + 1
    model.load_state_dict(
        {name: torch.from_numpy(value) for name, value in tensors_of(folders[0]).items()}, strict=False
    )
    engine.send_weights()
    ray.get(receiver.update_weight_version.remote(str(version + 10)))
    assert version_of(client) == version + 10 and roll(client, "vllm-renamed") == spoken[0]
    json.dumps(ray.get(receiver.loaded.remote()).model_dump())
