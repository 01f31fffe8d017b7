"""The connector's worker side over stand-ins for vLLM's: what it reports of a load that is late."""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from stand_ins import loaded_with

import tailrace.kvpool.store  # noqa: F401 - before the worker's own import, which is undone
from tailrace.deployments.metrics.registry import CAUSES


@dataclass
class Results:
    """Fields of vLLM's KVConnectorTransferResults."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class StoreWorker:
    """vLLM's worker side. `results`, `errors`: loads that have returned, and their blocks that did not come. `started`:
    the metadata whose loads were started.
    """

    block_size = 32

    def start_load_kv(self, metadata) -> None:
        self.started.append(metadata)

    def get_transfer_results(self, finished_req_ids, metadata) -> Results:
        return self.results

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self.errors = self.errors, set()
        return errors


V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
STAND_INS = {
    "mooncake.store": {"MooncakeDistributedStore": object},
    "vllm.distributed.kv_transfer": {"get_kv_transfer_group": None},
    f"{V1}.base": {"KVConnectorTransferResults": Results},
    f"{V1}.mooncake.rdma_utils": {"get_requester_local_hostname": None},
    f"{V1}.mooncake.store.data": {"MooncakeStoreWorkerMetadata": object, "ReqMeta": object},
    f"{V1}.mooncake.store.worker": {"MooncakeStoreWorker": StoreWorker},
    "vllm.distributed.mooncake_store": {"MooncakeStoreConfig": None, "setup_mooncake_store": None},
    "vllm.platforms": {"current_platform": None},
    "vllm.utils.network_utils": {"get_ip": None},
}

worker = loaded_with("tailrace.kvpool.worker", STAND_INS)


class Rank(worker.PoolWorker):
    """A worker with loads, by hand, and a deadline of two seconds."""

    def __init__(self, loads: dict):
        self._loads, self._load_deadline_s = loads, 2.0
        self._broken, self._ended, self._unheard = set(), set(), set()
        self._report = SimpleNamespace(returned_loads=Counter(), failed_loads={}, pulls=[])
        self._counts, self.results, self.errors, self.started = worker.Counts(), Results(), set(), []
        self._due, self._sent = [], SimpleNamespace(step=0)

    def look(self, returned=(), errors=()) -> tuple[set, set, set]:
        """Returns the loads that have ended, those computed anew, and the blocks computed again in their places."""
        self.results, self.errors = Results(finished_recving=set(returned)), set(errors)
        found = self.get_transfer_results(set(), None)
        return found.finished_recving, found.failed_recving, self.get_block_ids_with_load_errors()


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now_s = [10.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_a_late_load_s_request_is_computed_anew_as_its_blocks_are_still_written(clock):
    """vLLM computes invalid blocks again in their places, but gives up all blocks of a request that failed."""
    rank = Rank({"late": worker.Load({4, 5}, 64, 10.0), "early": worker.Load({6}, 32, 11.0)})
    clock[0] = 12.0
    assert rank.look() == (set(), set(), set())
    clock[0] = 12.5
    assert rank.look() == ({"late"}, {"late"}, set()) and rank._report.failed_loads == {"late": "late"}
    assert rank.look() == (set(), set(), set()), "it is reported once"
    assert rank.look(returned=["late"], errors=[5]) == (set(), set(), set())
    assert rank._report.returned_loads == {"late": 1}


def test_a_request_whose_load_returned_without_some_blocks_is_computed_anew(clock):
    """As blocks that are invalid they were missed during a redraw, which hides all requests but its own; and of a load
    in parts, which an SSD's buffer makes, those after the first that fails are not made, nor reported.
    """
    rank = Rank({"r": worker.Load({4, 5}, 64, 10.0, arrived_s=10.5), "s": worker.Load({6}, 32, 10.0, arrived_s=10.5)})
    assert rank.look(errors=[5]) == (set(), set(), set()), "its load has not returned"
    assert rank.look(returned=["r", "s"]) == ({"r", "s"}, {"r"}, set())
    assert rank._report.failed_loads == {"r": "failed"} and rank._report.pulls == [(32, 0.5)]
    rank._loads = {"t": worker.Load({5}, 32, 10.0, arrived_s=10.5)}
    assert rank.look(returned=["t"]) == ({"t"}, set(), set()), "the block came this time"


def test_the_causes_of_failed_loads_are_those_that_the_metric_names(clock):
    """Others count there as `other`: tokens whose KV did not come had no cause of their own."""
    rank = Rank({"late": worker.Load({4}, 32, 7.0), "lost": worker.Load({5}, 32, 10.0)})
    rank.look(returned=["lost"], errors=[5])
    made = {f"pull_{failure}" for failure in rank._report.failed_loads.values()}
    assert made == {cause for cause in CAUSES if cause.startswith("pull_")} == {"pull_late", "pull_failed"}


@pytest.mark.parametrize("passed", [False, True], ids=["the pass raises", "a later part raises"])
def test_loads_of_a_step_that_raises_are_started_once_on_a_gpu_too(clock, monkeypatch, passed):
    """V2 starts them after the pass: they were never made, and their blocks were held for ever."""
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    spec = SimpleNamespace(can_load=True, vllm_cached_tokens=32, kvpool_cached_tokens=96)
    request = SimpleNamespace(req_id="r", can_save=False, load_spec=spec, block_ids=([3, 4, 5, 6],))
    rank, metadata = Rank({}), SimpleNamespace(step=7, requests=[request])
    rank.begin(metadata)
    if passed:
        rank.start_load_kv(metadata)
    assert rank.begin_again(heard=6) == 7 and rank.begin_again(heard=6) == 7
    assert rank.started == [metadata] and rank._loads["r"].block_ids == {4, 5}
    rank._loads["r"].arrived_s = 10.0
    assert rank.look(returned=["r"]) == ({"r"}, set(), set()) and rank._report.returned_loads == {"r": 1}
