"""Adapters on a service of two replicas with a pool and a gateway: moves, a killed replica, and both clients agree."""

import asyncio

import pytest
from gateway_service import TOKENS, gateway
from made_adapters import make_adapter

from tailrace.app.calls.refused import AdapterRejected, UnknownAdapter
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.http import Client
from tailrace.lab.verification.disturbances import kill_a_replica
from tailrace.policies.families.registry import Policies

pytestmark = [pytest.mark.live, pytest.mark.long]

NAMES = (None, "poet", "clerk")
GROUPS = tuple(
    PromptGroup(prompt_id=f"{name}", token_ids=(5, 300, 7, 41) * 12, samples=4, max_tokens=400, adapter=name)
    for name in NAMES
)
MOVES = {"placement": "round_robin", "chunking": {"type": "fixed", "chunk_tokens": 32}}
WHOLE = {"placement": "pinned", "chunking": {"type": "fixed", "chunk_tokens": None}, "drafting": "off"}


def batch(name: str) -> RolloutBatch:
    return RolloutBatch(batch_id=name, groups=GROUPS, seed=3)


def tokens_of(groups) -> dict:
    return {group.prompt_id: [sample.token_ids for sample in group.samples] for group in groups}


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory):
    limits = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with gateway(tiny_model, tmp_path_factory.mktemp("gateway"), limits) as (url, client):
        root = tmp_path_factory.mktemp("adapters")
        for seed, name in enumerate(NAMES[1:]):
            client.load_adapter_blocking(name, str(make_adapter(root / name, seed)))
        client.set_policies_blocking(Policies(**WHOLE))
        expected = tokens_of(client.rollout_blocking(batch("whole")))
        client.set_policies_blocking(Policies(**MOVES))
        yield url, client, root, expected


def test_chunks_that_move_and_meet_in_batches_change_nothing(served):
    _, client, _, expected = served
    client.reset_caches_blocking()
    groups = list(client.rollout_blocking(batch("moved")))
    assert tokens_of(groups) == expected and len({str(expected[str(name)]) for name in NAMES}) == len(NAMES)
    samples = [sample for group in groups for sample in group.samples]
    assert any(len({part.replica_id for part in sample.segments}) == 2 for sample in samples)
    assert client.status_blocking().pool.counts["pool_tokens"] > 0
    digests = {one.name: one.digest for one in client.adapters_blocking()}
    for group in groups:
        found = {part.adapter_digest for sample in group.samples for part in sample.segments}
        assert found == {digests.get(group.prompt_id, "")}


def test_a_replica_that_replaces_a_killed_one_loads_what_its_chunks_want(served):
    _, client, _, expected = served

    async def disturbed() -> tuple[list, str]:
        killing = asyncio.ensure_future(kill_a_replica(client, "killed"))
        groups = [group async for group in client.rollout(batch("killed"))]
        return groups, await killing

    groups, note = asyncio.run(disturbed())
    assert note and tokens_of(groups) == expected


def test_the_light_client_gets_the_same_tokens_and_refusals(served):
    url, client, root, expected = served
    light = Client(url, TOKENS["trainer"])
    assert tokens_of(light.rollout_blocking(batch("light"))) == expected
    assert light.adapters_blocking() == client.adapters_blocking()
    with pytest.raises(UnknownAdapter, match="The model `judge` does not exist"):
        light.open().generate_blocking((5, 6), adapter="judge")
    with pytest.raises(AdapterRejected, match="rank 16 is greater than max_lora_rank 8"):
        light.load_adapter_blocking("judge", str(make_adapter(root / "judge", 9, rank=16)))
    with pytest.raises(PermissionError, match="needs role trainer"):
        Client(url, TOKENS["evaluator"]).load_adapter_blocking("judge", str(root / "judge"))
