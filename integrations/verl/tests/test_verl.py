"""The real verl with the plug-in: registries, clients, router, agent loops, weights."""

import asyncio
import copy
import subprocess
import sys

import numpy as np
import pytest
import ray
import torch
from sender import Sender
from stand_in import StandInServer
from tailrace_verl.agent_loop import group_size, names
from tailrace_verl.checkpoint_engine import TailraceCheckpointEngine
from tailrace_verl.replica import TailraceReplica
from tailrace_verl.weights import TailraceWeights
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, _agent_loop_registry
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import RolloutReplicaRegistry

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
CLIENTS = (LLMServerClient, FullyAsyncLLMServerClient)
PROMPTS = [[1, 10, 11, 3], [1, 20, 21, 3]]

LOADED = """
import sys
import verl
from verl.workers.rollout.replica import RolloutReplicaRegistry
assert "tailrace" in RolloutReplicaRegistry._registry
assert not {"vllm", "trl"} & set(sys.modules)
"""


def test_import_verl_alone_loads_the_plug_in_by_its_entry_point():
    subprocess.run((sys.executable, "-c", LOADED), check=True)


def test_the_registries_have_it():
    assert RolloutReplicaRegistry.get("tailrace") is TailraceReplica
    assert get_rollout_class("tailrace") is TailraceWeights
    assert CheckpointEngineRegistry.get("tailrace") is TailraceCheckpointEngine
    assert {"tailrace_agent", "tailrace_tool_agent"} <= set(_agent_loop_registry)


def test_sizes_of_engines_are_refused_in_verls_configuration(config):
    rollout = copy.deepcopy(config.actor_rollout_ref.rollout)
    rollout.tensor_model_parallel_size = 2
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size: give 1"):
        TailraceReplica(0, rollout, config.actor_rollout_ref.model)


def test_a_group_has_a_known_size_only_where_the_parameters_tell_training_from_validation(config):
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert group_size(rollout, SAMPLING) == 4
    validating = {name: getattr(rollout.val_kwargs, name) for name in ("temperature", "top_p", "top_k")}
    assert group_size(rollout, validating) == rollout.val_kwargs.n
    assert group_size(rollout, SAMPLING | {"temperature": 0.3}) is None


def test_names_of_a_row_are_those_of_verl_or_of_the_data():
    row = {"uid": "u", "session_id": 2, "global_steps": 5, "index": 1, "raw_prompt": [{"content": "x"}]}
    assert names(row, False) == {"group": "u", "index": 2, "step": 5}
    assert names(row, True) == names(row | {"uid": "v"}, True) != names(row | {"index": 2}, True)
    assert names({"raw_prompt": []}, False) == {}


async def _generate(manager, client_class, order, of):
    client = manager.get_client(client_class)

    async def one(prompt, index):
        request = f"{prompt}-{index}"
        named = {"group": f"p{prompt}", "index": index, "of": of, "step": 1}
        answer = await client.generate(
            request, prompt_ids=PROMPTS[prompt], sampling_params=dict(SAMPLING), mm_processor_output=None, **named
        )
        return (prompt, index), answer

    return dict(await asyncio.gather(*(one(*place) for place in order)))


PLACES = [(prompt, index) for prompt in range(2) for index in range(4)]


@pytest.mark.parametrize("client_class", CLIENTS)
async def test_clients_generate_and_order_changes_no_token(manager, client_class):
    first = await _generate(manager, client_class, PLACES, of=4)
    again = await _generate(manager, client_class, PLACES[::-1], of=4)
    alone = await _generate(manager, client_class, [(1, 2)], of=4)
    for place, answer in first.items():
        assert answer.token_ids and len(answer.log_probs) == len(answer.token_ids) <= 24
        assert max(answer.log_probs) <= 0 and answer.stop_reason in ("completed", "length")
        assert answer.token_ids == again[place].token_ids
        assert np.allclose(answer.log_probs, again[place].log_probs, atol=1e-5)
    assert alone[1, 2].token_ids == first[1, 2].token_ids
    assert len({tuple(answer.token_ids) for answer in first.values()}) == 8


async def test_requests_from_other_processes_get_the_same_tokens(manager):
    here = await _generate(manager, LLMServerClient, PLACES, of=4)
    client = manager.get_client()

    @ray.remote(num_cpus=0)
    class Worker:
        async def ask(self, place):
            prompt, index = place
            named = {"group": f"p{prompt}", "index": index, "of": 4, "step": 1}
            answer = await client.generate(
                "sticky", prompt_ids=PROMPTS[prompt], sampling_params=dict(SAMPLING), **named
            )
            return answer.token_ids

    workers = [Worker.remote() for _ in range(2)]
    there = await asyncio.gather(*(workers[place[1] % 2].ask.remote(place) for place in PLACES))
    assert there == [here[place].token_ids for place in PLACES]


async def test_a_request_without_a_name_says_so(manager):
    client = manager.get_client()
    answer = await client.generate("r", prompt_ids=PROMPTS[0], sampling_params=dict(SAMPLING))
    assert answer.extra_fields["tokens_keyed_by"] == "request_id"


async def test_a_field_that_is_not_honoured_is_refused(manager):
    with pytest.raises(ray.exceptions.RayTaskError, match=r"prompt_logprobs.*: not supported"):
        extra = {"prompt_logprobs": 1}
        await manager.get_client().generate("r", prompt_ids=PROMPTS[0], sampling_params=SAMPLING | extra)


async def test_control_calls_do_nothing_and_end(manager):
    (replica,) = manager.get_replicas()
    for call in ("abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation", "sleep", "wake_up"):
        await getattr(replica, call)()
    await replica.clear_kv_cache()
    await replica.start_profile(step=1)
    await replica.stop_profile()


@pytest.mark.parametrize("loop", ["tailrace_agent", "single_turn_agent", "tailrace_tool_agent"])
@pytest.mark.parametrize("client_class", CLIENTS)
async def test_agent_loops_give_verls_batch(manager, config, loop, client_class):
    worker = AgentLoopWorker(config, manager.get_client(client_class))
    rows = [(prompt, index) for prompt in range(2) for index in range(4)]
    columns = {
        "raw_prompt": [[{"role": "user", "content": f"w{10 + prompt} w{20 + prompt}"}] for prompt, _ in rows],
        "uid": [f"u{prompt}" for prompt, _ in rows],
        "session_id": [index for _, index in rows],
        "global_steps": [3] * len(rows),
        "index": [prompt for prompt, _ in rows],
        "agent_name": [loop] * len(rows),
        "tools_kwargs": [{} for _ in rows],
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(rows), dtype=object)
        arrays[name][:] = values
    made = await worker.generate_sequences(DataProto(non_tensor_batch=arrays, meta_info={"global_steps": 3}))
    mask, logprobs = made.batch["response_mask"].bool(), made.batch["rollout_log_probs"]
    lengths = mask.sum(-1)
    assert lengths.min() >= 1 and mask.shape == (8, 24)
    assert all(row[:length].all() for row, length in zip(mask, lengths, strict=True)), "one run of ones"
    assert (logprobs[mask] <= 0).all() and logprobs[mask].min() < 0 and (logprobs[~mask] == 0).all()
    assert made.non_tensor_batch["max_global_steps"] is not None
    if loop == "tailrace_agent":
        again = await worker.generate_sequences(DataProto(non_tensor_batch=arrays, meta_info={"global_steps": 3}))
        assert torch.equal(again.batch["responses"], made.batch["responses"])


def test_weights_of_every_rank_reach_the_service_and_versions_come_back_as_global_steps(manager, config, model):
    """verl's manager of checkpoint engines, with a trainer of two processes that shards a real model by FSDP2."""
    stands_in = TailraceReplica.server_class is StandInServer
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(Sender), model=str(model), stand_in=stands_in)
    trainer = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, bin_pack=False, use_gpu=False)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    checkpoints = CheckpointEngineManager(engine, trainer, manager.get_replicas())
    (server,) = manager.get_replicas()[0].servers

    def tokens():
        answers = asyncio.run(_generate(manager, LLMServerClient, PLACES, of=4))
        return {place: answer.token_ids for place, answer in answers.items()}, answers[0, 0].extra_fields

    before, _ = tokens()
    first = checkpoints.update_weights(global_steps=7)
    changed, fields = tokens()
    assert fields["min_global_steps"] == fields["max_global_steps"] == 7
    assert fields["weights_versions"][-1][2] == first["tailrace/weights_version"]
    assert changed != before, "other weights, other tokens"

    one, other = trainer.share()
    whole = trainer.whole()[0]
    assert "lm_head.weight" in whole and one.keys() | other.keys() == whole.keys() - {"lm_head.weight"}, "it is tied"
    assert not one.keys() & other.keys()
    sent = [first[f"tailrace/published_bytes/rank_{rank}"] for rank in range(2)]
    assert sent == [sum(one.values()), sum(other.values())]
    assert abs(sum(one.values()) - sum(other.values())) <= max((one | other).values())
    if stands_in:
        loaded = ray.get(server.tensors.remote())
        assert all(torch.equal(loaded.pop(name), whole[name]) for name in one | other) and not loaded

    trainer.break_next(True)
    with pytest.raises(ray.exceptions.RayTaskError, match="no memory is left"):
        checkpoints.update_weights(global_steps=8)
    trainer.break_next(False)
    kept, fields = tokens()
    assert kept == changed and fields["global_steps"] == 7, "the service keeps its weights"
    last = checkpoints.update_weights(global_steps=9)
    assert last["tailrace/weights_version"] == first["tailrace/weights_version"] + 2, "an ended version is not repeated"
    assert tokens()[1]["global_steps"] == 9
