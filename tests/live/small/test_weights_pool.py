"""Weights for a node where they were not staged: its keeper puts them into a real pool, and the node pulls them."""

import os

import numpy as np
import pytest
from waiting import WAIT_S, until

from tailrace.deployments.staging.pool_copy import key_of, pull
from tailrace.deployments.staging.slots import MemorySource, Slots
from tailrace.deployments.staging.stage import Stage
from tailrace.deployments.staging.verified import Verifier
from tailrace.kvpool.pool_config import PoolConfig

pytestmark = pytest.mark.live

CONFIG = PoolConfig(dram_gib=0.125)
APP, SERVICE = "weights-pool-test", f"weights-pool-test-{os.getpid()}"


def joining_app():
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Joins:
        def __init__(self):
            from tailrace.kvpool.pool import join_pool

            self.endpoint = join_pool(CONFIG, APP)

        async def get(self):
            return self.endpoint

    return Joins.bind()


@pytest.fixture(scope="module")
def endpoint(deploy):
    return deploy(joining_app(), APP).get.remote().result(timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def keeper(endpoint):
    from tailrace.deployments.staging.keeper import keep_slots

    keep_slots(SERVICE, APP)
    yield
    Slots(SERVICE).remove()


def staged(version: int, megabytes: int, seed: int = 0) -> MemorySource:
    """Some tensors, of which one takes several values of the pool."""
    draw = np.random.default_rng(seed)
    large = draw.random((megabytes, 2**18), dtype=np.float32)
    stage = Stage(Slots(SERVICE), version, (0, ""))
    for name, tensor in {"large": large, "model.a/b": draw.random(5), "empty": np.zeros((0, 2), np.int8)}.items():
        stage.add(name, tensor)
    return stage.seal()


def bytes_of(folder) -> dict:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def client_of(endpoint):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup(endpoint.host, "P2PHANDSHAKE", 0, 2**20, "tcp", "", endpoint.master_address) == 0
    return store


def test_another_node_pulls_what_was_staged_to_the_byte(keeper, tmp_path):
    source = staged(1, 20)
    folder = pull(source, CONFIG, APP, tmp_path)
    Verifier().verify(folder, source)
    assert bytes_of(folder) == bytes_of(Slots(SERVICE).held()[1, source.digest])
    assert folder.stat().st_mode & 0o777 == 0o700 and not Slots(SERVICE, tmp_path).part.exists()
    assert pull(source, CONFIG, APP, tmp_path) == folder


def test_a_late_node_pulls_from_the_pool_after_the_staging_one_has_forgotten(keeper, endpoint, tmp_path):
    source = staged(2, 1)
    (tmp_path / "first").mkdir()
    pull(source, CONFIG, APP, tmp_path / "first")
    staged(3, 1, seed=3), staged(4, 1, seed=4)
    assert (2, source.digest) not in Slots(SERVICE).held()
    (tmp_path / "late").mkdir()
    Verifier().verify(pull(source, CONFIG, APP, tmp_path / "late"), source)


def test_another_content_of_one_version_replaces_the_first(keeper, tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first = staged(5, 1, seed=5)
    pull(first, CONFIG, APP, tmp_path / "a")
    second = staged(5, 1, seed=6)
    assert first.digest != second.digest
    Verifier().verify(pull(second, CONFIG, APP, tmp_path / "b"), second)


def test_weights_that_no_node_has_are_refused_in_one_line(keeper, tmp_path):
    source = MemorySource(SERVICE, 9, "0123456789abcdef")
    with pytest.raises(
        ValueError, match=r"^weights memory:.*/9/.*: no node has them in shared memory; send them again"
    ):
        pull(source, CONFIG, APP, tmp_path)
    assert Slots(SERVICE, tmp_path).held() == {} and not Slots(SERVICE, tmp_path).part.exists()


def test_a_value_that_was_evicted_is_put_again_and_leaves_no_half_slot_once_it_is_lost(keeper, endpoint, tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    source = staged(6, 1, seed=7)
    pull(source, CONFIG, APP, tmp_path / "a")
    store = client_of(endpoint)
    assert store.remove(key_of(source, "model.a/b"), force=True) == 0
    (tmp_path / "c").mkdir()
    Verifier().verify(pull(source, CONFIG, APP, tmp_path / "c"), source)
    staged(7, 1, seed=8), staged(8, 1, seed=9)
    assert store.remove(key_of(source, "model.a/b"), force=True) == 0
    store.close()
    with pytest.raises(ValueError, match="no node has them in shared memory; send them again"):
        pull(source, CONFIG, APP, tmp_path / "b")
    assert not Slots(SERVICE, tmp_path / "b").part.exists() and Slots(SERVICE, tmp_path / "b").held() == {}


def test_weights_larger_than_the_pool_are_refused_in_one_line(keeper, tmp_path):
    source = staged(7, 200)
    with pytest.raises(ValueError, match=r"does not fit into the pool \(Mooncake says -200\); raise pool.dram_gib"):
        pull(source, CONFIG, APP, tmp_path)


def test_slots_end_with_their_application(keeper):
    from ray import serve

    staged(8, 1)
    serve.delete(APP)
    assert until(lambda: not Slots(SERVICE).held())
