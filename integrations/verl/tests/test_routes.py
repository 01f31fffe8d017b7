"""Routed experts of samples in verl's batches: position by position, over one turn and several."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from stand_in import StandInServer, routes_of
from tailrace_verl.requests import Lengths
from tailrace_verl.routes import check_kept
from tailrace_verl.settings import Settings
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.experimental.agent_loop.tool_parser import FunctionCall, HermesToolParser
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

CLIENTS = (LLMServerClient, FullyAsyncLLMServerClient)
ROWS = [(prompt, index) for prompt in range(2) for index in range(4)]
VERL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def server(keeps: bool = True) -> StandInServer:
    one = StandInServer(Settings(), Lengths(16, 32), 5, (), True)
    asyncio.run(one.connected()).keeps = keeps
    return one


@pytest.fixture
def replaying(manager):
    """The manager's server, as if verl asked for routes."""
    (handle,) = manager.get_replicas()[0].servers
    ray.get(handle.replay.remote(True))
    yield manager
    ray.get(handle.replay.remote(False))


@pytest.fixture
def outputs(monkeypatch):
    """What verl's agent loops make, as its trainer with the TransferQueue takes it: a dictionary each."""
    found: list[dict] = []
    padded = AgentLoopWorker._agent_loop_postprocess

    async def seen(self, output: AgentLoopOutput, *args, **kwargs):
        found.append(output.model_copy(deep=True).as_dict())
        return await padded(self, output, *args, **kwargs)

    monkeypatch.setattr(AgentLoopWorker, "_agent_loop_postprocess", seen)
    return found


def rows(loop: str) -> DataProto:
    columns = {
        "raw_prompt": [[{"role": "user", "content": f"w{10 + prompt} w{20 + prompt}"}] for prompt, _ in ROWS],
        "uid": [f"u{prompt}" for prompt, _ in ROWS],
        "session_id": [index for _, index in ROWS],
        "global_steps": [3] * len(ROWS),
        "index": [prompt for prompt, _ in ROWS],
        "agent_name": [loop] * len(ROWS),
        "tools_kwargs": [{} for _ in ROWS],
    }
    arrays = {name: np.array([*values, None], dtype=object)[:-1] for name, values in columns.items()}
    return DataProto(non_tensor_batch=arrays, meta_info={"global_steps": 3})


def call_tools(monkeypatch, times: int) -> None:
    """Each trajectory calls a tool after each of its first turns."""
    turns: dict[int, int] = {}

    async def extract(self, response_ids, tools=None):
        turns[id(self)] = turns.get(id(self), 0) + 1
        calls = [FunctionCall(name="w7", arguments="{}")] if turns[id(self)] <= times else []
        return "w5", calls

    monkeypatch.setattr(HermesToolParser, "extract_tool_calls", extract)


def assert_routes(found: torch.Tensor, context: torch.Tensor, generated: torch.Tensor) -> None:
    """`found`: [tokens, layers, experts]. Rows are those of the context up to the last generated token but one."""
    known, truth = int(generated.nonzero().max()), torch.from_numpy(routes_of(context.tolist()).astype(np.int16))
    assert found.dtype == torch.int16 and found.shape == truth.shape
    assert torch.equal(found[:known], truth[:known])
    was_cut = torch.equal(
        found[known:], truth[known:]
    )  # then a pass has computed it: verl's response_length is shorter
    assert was_cut or not found[known:].any(), "no pass has computed them"


async def batch_of(replaying, config, loop: str, client_class):
    return (await AgentLoopWorker(config, replaying.get_client(client_class)).generate_sequences(rows(loop))).batch


def assert_batch(batch) -> None:
    held, generated = batch["attention_mask"].bool(), torch.zeros_like(batch["attention_mask"])
    generated[:, -batch["response_mask"].shape[1] :] = batch["response_mask"]
    for row, mask, own, routes in zip(batch["input_ids"], held, generated, batch["routed_experts"], strict=True):
        assert_routes(routes[mask], row[mask], own[mask])
        assert not routes[~mask].any(), "padding"


@pytest.mark.parametrize("cluster", ["stand_in"], indirect=True)
@pytest.mark.parametrize("client_class", CLIENTS)
@pytest.mark.parametrize("loop", ["tailrace_agent", "single_turn_agent"])
async def test_routes_come_through_verls_padding(replaying, config, outputs, loop, client_class):
    batch = await batch_of(replaying, config, loop, client_class)
    assert_batch(batch)
    for one in outputs:
        context = torch.cat([one["prompts"], one["responses"]])
        assert_routes(one["routed_experts"], context, torch.arange(len(context)) >= len(one["prompts"]))


@pytest.mark.parametrize("cluster", ["stand_in"], indirect=True)
@pytest.mark.parametrize("client_class", CLIENTS)
@pytest.mark.parametrize("times", [1, 2, 9])
async def test_the_last_turn_has_the_routes_of_all(replaying, config, outputs, monkeypatch, times, client_class):
    call_tools(monkeypatch, times)
    batch = await batch_of(replaying, config, "tailrace_tool_agent", client_class)
    assert_batch(batch)
    turns = {one["num_turns"] for one in outputs}
    assert min(turns) >= 4, "several turns each"


@pytest.mark.parametrize("cluster", ["stand_in"], indirect=True)
async def test_verl_gets_none_that_it_does_not_ask_for(manager, config):
    assert "routed_experts" not in await batch_of(manager, config, "tailrace_agent", LLMServerClient)


def test_engines_without_routes_are_refused_before_the_first_sample():
    with pytest.raises(
        ValueError, match=r"enable_rollout_routing_replay: replica one keeps no routed experts"
    ) as error:
        asyncio.run(server(keeps=False).check())
    assert len(str(error.value).splitlines()) == 1
    assert asyncio.run(server().check()) == 0


def test_a_service_that_starts_is_asked_until_a_replica_has_reported():
    reports = [(), (replica(None),), (replica(0.5), replica(None))]

    async def status():
        return SimpleNamespace(replicas=reports.pop(0))

    with pytest.raises(ValueError, match="replica one keeps no"):
        asyncio.run(check_kept(status))
    assert not reports


def replica(observed_s: float | None) -> SimpleNamespace:
    return SimpleNamespace(replica_id="one", observed_s=observed_s, keeps_routes=False)


@pytest.mark.live
@pytest.mark.parametrize("cluster", ["service"], indirect=True)
def test_a_service_says_whether_its_engines_keep_routes(cluster):
    with pytest.raises(ValueError, match=r"replica \S+ keeps no routed experts; give the service's engine vllm_args"):
        asyncio.run(cluster(Settings(), Lengths(16, 32), 5, (), True).check())


async def ask(one: StandInServer, index: int):
    return await one.generate([7, 8], dict(VERL), "id", group="u", index=index, of=2)


def test_a_sample_of_the_token_log_has_its_context_computed_again():
    one = server()
    one.stand_in.logged = {1}

    async def both():
        return await asyncio.gather(*(ask(one, index) for index in range(2)))

    for answer in asyncio.run(both()):
        assert np.array_equal(answer.routed_experts, routes_of([7, 8, *answer.token_ids[:-1]]))
    assert asyncio.run(one.sent()) == [("u", 2, 0), ("u.1.routes", 1, 0)]


def test_a_sample_that_cannot_have_any_is_an_error_in_one_line():
    one = server(keeps=False)
    with pytest.raises(ValueError, match="a sample has no routed experts"):
        asyncio.run(ask(one, 0))
