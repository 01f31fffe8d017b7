"""Two nodes: a store on each; KV travels to the node where its sample is expected next; the master's node is lost."""

import asyncio
import contextlib
import json
import os

import pytest
from ray.exceptions import RayActorError

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import LOOPBACK_ONLY
from tailrace.app.config import load_config, with_engine
from tailrace.app.files.prompts import read_prompts
from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.lab.demo import PROMPTS
from tailrace.policies.families.registry import Policies

pytestmark = pytest.mark.long

LONG = {"max_tokens": 700, "sampling": {"ignore_eos": True}}
"""Samples of a rollout that lasts longer than the start of two shards."""

ONE_SLOT = {"max_running": 1, "cores": None}
"""Samples have to wait, so that there is time for KV to travel."""

SAMPLES = 5
"""One of each group, on two slots: each next chunk is of the sample with the fewest tokens, so that, as their number is
odd, most samples change nodes between their chunks."""


def start_master_there(file) -> None:
    """On the node that will be lost."""
    import ray

    @ray.remote(num_cpus=0, resources={"lost": 1})
    def start() -> None:
        from tailrace.kvpool.pool import ensure_pool

        ray.get(ensure_pool(file.application.args.pool, file.application.name).where.remote())

    ray.get(start.remote())


@pytest.fixture(scope="module")
def cluster(model_dir):
    os.environ.update(LOOPBACK_ONLY)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from tailrace.app.build import build_from_file

    file = with_engine(load_config(), ONE_SLOT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        cluster.lost = cluster.add_node(num_cpus=0, resources={"lost": 1})
        ray.init(address=cluster.address, log_to_driver=False, logging_level="WARNING")
        serve.start(proxy_location="Disabled", http_options={"host": "127.0.0.1"})
        start_master_there(file)
        serve.run(build_from_file(file), name=file.application.name, route_prefix=None)
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def client(cluster):
    return RolloutClient(load_config().application.name)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 300))


async def roll(client: RolloutClient, name: str, policies: Policies, **more) -> dict:
    """`more`: of each group, besides its text."""
    await client.set_policies(policies)
    await client.reset_caches()  # KV of an earlier turn must not be found where it was made,
    await client.drain_pool()  # nor lie already where this turn would bring it
    groups = tuple(read_prompts(PROMPTS, {"samples": 1, "max_tokens": 160} | more))[:SAMPLES]
    batch = RolloutBatch(batch_id=name, groups=groups)
    return {group.prompt_id: group async for group in client.rollout(batch)}


async def reported(client: RolloutClient) -> dict:
    await asyncio.sleep(1.5)  # three polls
    return (await client.status()).pool.counts


def moving(prefetch: str) -> Policies:
    return Policies(placement="least_kv", chunking={"type": "fixed", "chunk_tokens": 32}, prefetch=prefetch)


async def ahead(client: RolloutClient) -> dict:
    """The groups of the first rollout in which KV travels ahead: KV that is saved late is not asked for."""
    for turn in range(10):
        groups = await roll(client, f"ahead-{turn}", moving("next_up"))
        if (await reported(client)).get("moved_keys"):
            return groups
    raise AssertionError("no KV travelled ahead in ten rollouts")


def test_kv_travels_ahead_to_the_node_where_its_sample_goes_on(client):
    status = run(client.status()).pool.status
    assert len({node["node_id"] for node in status["store_nodes"]}) == 2
    plain = run(roll(client, "plain", moving("off")))
    before = run(reported(client))
    assert not before.get("moved_keys")
    groups = run(ahead(client))
    after = run(reported(client))
    assert after["pool_tokens"] > before.get("pool_tokens", 0)
    assert {n: [s.token_ids for s in g.samples] for n, g in plain.items()} == {
        n: [s.token_ids for s in g.samples] for n, g in groups.items()
    }


async def mounted(client: RolloutClient, but_not_at: str = "") -> dict:
    """The pool's status once its master is at another address and both stores are mounted there."""
    while True:
        status = (await client.status()).pool.status
        moved = status is not None and status["master_address"] != but_not_at
        if moved and sum(bool(node["segment"]) for node in status["store_nodes"]) == 2:
            return status
        await asyncio.sleep(0.2)


async def pulls(client: RolloutClient) -> dict:
    """The groups of the first rollout that pulls KV from the pool: engines rejoin within seconds."""
    for turn in range(20):
        before = (await reported(client)).get("pool_tokens", 0)
        groups = await roll(client, f"again-{turn}", moving("off"))
        if (await reported(client)).get("pool_tokens", 0) > before:
            return groups
    raise AssertionError("no KV was pulled after the master had moved")


async def store_leaves(client: RolloutClient, store) -> dict:
    """The pool's status once this store has left; its engine keeps asking for it, so it is made to leave again."""
    with contextlib.suppress(RayActorError):  # it has ended
        while True:
            await store.leave.remote()
            await asyncio.sleep(0.2)
    while True:
        status = (await client.status()).pool.status
        if status is not None and status["left_stores"]:
            return status
        await asyncio.sleep(0.2)


async def store_changes(client: RolloutClient, store) -> tuple[dict, dict]:
    """The groups of a rollout in which a store leaves and comes back, and the pool's status after it has left."""
    rolling = asyncio.ensure_future(roll(client, "changed", moving("off"), **LONG))
    while not ((await client.status()).pool.status or {}).get("keys"):
        await asyncio.sleep(0.1)
    status = await store_leaves(client, store)
    return await rolling, status


def test_a_store_comes_and_goes_during_a_rollout(client, cluster):
    import ray

    from tailrace.kvpool.pool import NAMESPACE, master_name

    file = load_config()
    args, name = with_engine(file, ONE_SLOT).application.args, file.application.name
    before = run(mounted(client))
    gone = before["store_nodes"][0]
    store = ray.get_actor(f"{master_name(args.pool, name)}-store-{gone['node_id']}", NAMESPACE)
    plain = run(roll(client, "unchanged", moving("off"), **LONG))
    missed = run(reported(client))
    groups, status = run(store_changes(client, store))
    assert {n: [s.token_ids for s in g.samples] for n, g in plain.items()} == {
        n: [s.token_ids for s in g.samples] for n, g in groups.items()
    }
    after = run(mounted(client))
    assert gone["pid"] not in {node["pid"] for node in after["store_nodes"]}, "another store has its place"
    kept = ("left_stores", "handed_keys", "handed_bytes", "lost_keys", "hand_over_ms")
    counts = {name: number - missed.get(name, 0) for name, number in run(reported(client)).items()}
    print(json.dumps({"store": {what: status[what] for what in kept}, "pool": counts}))


def test_the_masters_node_is_lost_and_the_pool_continues_on_another(client, cluster):
    before = run(mounted(client))
    plain = run(roll(client, "before", moving("off")))
    cluster.remove_node(cluster.lost)
    run(mounted(client, before["master_address"]))
    groups = run(pulls(client))
    assert {n: [s.token_ids for s in g.samples] for n, g in plain.items()} == {
        n: [s.token_ids for s in g.samples] for n, g in groups.items()
    }
