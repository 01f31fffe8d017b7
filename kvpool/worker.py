"""The connector's worker side: vLLM's Mooncake worker, with deadlines for loads and a record of every save.

Invariant: a load is reported to the scheduler exactly once, when it ends or at its deadline, whichever comes first; a
late load still writes into blocks that the scheduler keeps pinned until it has returned. Needs no CUDA.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from mooncake.store import MooncakeDistributedStore
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.rdma_utils import get_requester_local_hostname
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import MooncakeStoreWorkerMetadata, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker
from vllm.distributed.mooncake_store import MooncakeStoreConfig, setup_mooncake_store
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip

from tailrace.kvpool.block_check import BlockCheck, DeviceBytes, Register, host_bytes, mac_key
from tailrace.kvpool.counts import Counts
from tailrace.kvpool.keys import PREFIX
from tailrace.kvpool.store import MAX_PIECES, PoolStore

PROBE_BLOCKS = (1, 8)
"""Sizes of probes, in blocks: enough to separate the fixed cost of a pull from its speed; they occupy the KV cache for
some milliseconds.
"""


@dataclass
class PoolWorkerMetadata(MooncakeStoreWorkerMetadata):
    """Report of one rank after a step; ranks add up."""

    saved_tokens: dict[int, int] = field(default_factory=dict)  # store job -> tokens from the start that are saved
    returned_loads: Counter = field(default_factory=Counter)  # request -> ranks whose load has returned
    failed_loads: dict[str, str] = field(default_factory=dict)  # request -> why its load failed
    counts: Counter = field(default_factory=Counter)
    pulls: list[tuple[int, float]] = field(default_factory=list)  # (tokens, seconds) of successful transfers
    step: int = 0  # number of the scheduler's metadata that this follows

    def aggregate(self, other: "PoolWorkerMetadata") -> "PoolWorkerMetadata":
        super().aggregate(other)
        for job, tokens in other.saved_tokens.items():
            self.saved_tokens[job] = min(tokens, self.saved_tokens.get(job, tokens))
        self.returned_loads += other.returned_loads
        self.failed_loads |= other.failed_loads
        self.counts += other.counts
        self.pulls += other.pulls
        return self


@dataclass
class SaveOfEnded(ReqMeta):
    """A save of a request that has ended: earlier steps have computed all of it."""


@dataclass(slots=True)
class Load:
    """A load that has not returned."""

    block_ids: set[int]
    tokens: int
    started_s: float
    arrived_s: float = 0.0  # when its last block came; the step that runs then may take much longer
    late: bool = False  # reported as failed at its deadline


class PoolWorker(MooncakeStoreWorker):
    """Deadlines and the pause after a failure come from `kv_connector_extra_config`, in seconds."""

    def __init__(self, vllm_config, kv_cache_config):
        super().__init__(vllm_config, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._load_deadline_s = extra["load_deadline_s"]
        self._counts = Counts()
        self.store = PoolStore(self.store, self._counts, extra["retry_s"], block_check(extra))
        self._client = MooncakeStoreConfig.load_from_config()
        self._loads: dict[str, Load] = {}
        self._broken: set[int] = set()  # blocks of loads that failed and have not returned
        self._report = self._sent = PoolWorkerMetadata()
        self._step, self._due = 0, []  # of the metadata last begun: its number, and saves that await its pass
        self._unstarted = None  # that metadata, until its loads are started
        self._ended: set[str] = set()  # loads in the report last sent
        self._unheard: set[str] = set()  # loads whose end is to be reported again

    def rejoin(self, master_address: str) -> None:
        """Switches to the master at another address. Raises RuntimeError, and changes nothing, if it is not there."""
        config, store = replace(self._client, master_server_address=master_address), MooncakeDistributedStore()
        setup_mooncake_store(store, config, get_requester_local_hostname(get_ip()))
        self.store.replace(store)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        send = self.kv_send_thread
        retire = send.finish_store_job

        def finish_store_job(job) -> None:
            """Records how far the request was saved, before vLLM removes it with the job."""
            with send.done_task_lock:
                self._report.saved_tokens[job.store_job_id] = send._saved_offset.get(job.req_id, 0)
            retire(job)

        send.finish_store_job = finish_store_job
        for receive in self.kv_recv_threads:
            receive.set_finished_request = partial(self._arrived, receive.set_finished_request)

    def _arrived(self, finish: Callable[[str], None], req_id: str) -> None:
        """Records when a load's last block came, on the loading thread, before vLLM reports the load."""
        self._loads[req_id].arrived_s = time.monotonic()
        finish(req_id)

    def keep_beside(self, blocks: torch.Tensor) -> None:
        """Saves and loads a row of this tensor with the KV of each block. It is on the KV's device and stays there.

        Raises RuntimeError if Mooncake refuses its memory.
        """
        if (code := self.store.register_buffer(blocks.data_ptr(), blocks.nbytes)) != 0:
            raise RuntimeError(f"the pool's client does not take what belongs to the KV: Mooncake says {code}")
        for database in self.token_dbs:
            database.kv_caches_base_addr.append(blocks.data_ptr())
            database.block_len.append(blocks.stride(0) * blocks.element_size())

    def begin(self, metadata) -> None:
        """Starts, before the step's forward pass, the saves that need not wait for it, and on a CPU the loads too.
        There vLLM's own call comes after the pass, which is a step later.
        """
        self._step, saves = getattr(metadata, "step", 0), [one for one in metadata.requests if one.can_save]
        self._unstarted = metadata
        self._due = [request for request in saves if not isinstance(request, SaveOfEnded)]
        self._save([request for request in metadata.requests if isinstance(request, SaveOfEnded)])
        if current_platform.is_cpu():
            self._start_loads(metadata)

    def start_load_kv(self, metadata) -> None:
        if not current_platform.is_cpu():
            self._start_loads(metadata)

    def _start_loads(self, metadata) -> None:
        self._unstarted = None
        for request in metadata.requests:
            spec = request.load_spec
            if spec is not None and spec.can_load:
                first, last = spec.vllm_cached_tokens // self.block_size, spec.kvpool_cached_tokens // self.block_size
                blocks = {block for group in request.block_ids for block in group[first:last]}
                tokens = spec.kvpool_cached_tokens - spec.vllm_cached_tokens
                self._loads[request.req_id] = Load(blocks, tokens, time.monotonic())
        super().start_load_kv(metadata)

    def wait_for_save(self, metadata) -> None:
        """Starts saves after the pass. vLLM calls it also if the pass has raised: then its blocks do not hold the KV of
        their names.
        """
        due, self._due = self._due, []
        if sys.exc_info()[0] is None:
            self._save(due)
        else:
            self._drop(due)

    def _drop(self, jobs: list[ReqMeta]) -> None:
        """Ends saves that are not made."""
        for job in jobs:
            self.kv_send_thread.finish_store_job(job)

    def begin_again(self, heard: int) -> int:
        """Ends the half of a step that raised. `heard`: number of the last report that the scheduler has received; a
        later report is sent again. Returns the number of the metadata last begun. Its loads are started at the latest
        now, since their blocks are held until they return: V2 starts them after the pass.
        """
        due, self._due = self._due, []
        self._drop(due)
        if self._unstarted is not None:
            self._start_loads(self._unstarted)
        if self._sent.step > heard:
            with self.kv_send_thread.done_task_lock:
                self._report = self._sent.aggregate(self._report)
            self._sent = PoolWorkerMetadata()
            self._unheard |= self._ended
        return self._step

    def _save(self, jobs: list[ReqMeta]) -> None:
        """Passes saves to the saving thread; on a CPU there is nothing to wait for."""
        fence = torch.cuda.Event() if jobs and torch.cuda.is_available() else None
        if fence is not None:
            fence.record()
        for job in jobs:
            job.current_event = fence
            self.kv_send_thread.add_request(job)

    def get_transfer_results(self, finished_req_ids, metadata) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids, metadata)
        self._broken |= super().get_block_ids_with_load_errors()
        failed, ended, now_s = set(results.failed_recving or ()), set(), time.monotonic()
        for req_id in results.finished_recving or ():
            load = self._loads.pop(req_id)
            self._report.returned_loads[req_id] += 1
            if not load.late:  # else its request was reported failed, and has other blocks by now
                ended.add(req_id)
                if load.block_ids & self._broken:
                    failed.add(req_id)
                self._count_load(req_id, load, "failed" if req_id in failed else None)
            self._broken -= load.block_ids
        for req_id, load in self._loads.items():
            if not load.late and now_s - load.started_s > self._load_deadline_s:
                load.late = True
                ended.add(req_id)
                failed.add(req_id)
                self._count_load(req_id, load, "late")
        ended |= self._unheard
        self._ended, self._unheard = set(ended), set()
        return KVConnectorTransferResults(
            finished_sending=results.finished_sending,
            finished_recving=ended,
            failed_recving=failed & ended,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns no blocks: `get_transfer_results` says which requests failed. vLLM computes invalid blocks in place,
        which a late load still writes; it looks for them in a queue that is empty during a redraw; and of a load in
        parts those after the first that fails are not made, on some ranks those of earlier blocks.
        """
        return set()

    def build_connector_worker_meta(self) -> PoolWorkerMetadata:
        self._report.counts += self._counts.take()
        with self.kv_send_thread.done_task_lock:
            report, self._report = self._report, PoolWorkerMetadata()
            completed, self.kv_send_thread._completed_saves = self.kv_send_thread._completed_saves, {}
            report.completed_saves = dict(Counter(report.completed_saves) + Counter(completed))
        report.step, self._sent = self._step, report
        return report

    def _count_load(self, req_id: str, load: Load, failure: str | None) -> None:
        took_s = time.monotonic() - load.started_s
        self._counts.took("pull_wait", took_s)
        if failure is None:
            self._counts.add("loaded_tokens", load.tokens)
            self._report.pulls.append((load.tokens, load.arrived_s - load.started_s))
        else:
            self._report.failed_loads[req_id] = failure
            self._counts.add(f"pull_failed.{failure}")

    def layout(self) -> tuple[tuple[str, ...], int]:
        """Returns (prefixes of the keys under which a block is kept, over all ranks; bytes of one token's KV on this
        rank).
        """
        prefixes = tuple(prefix for group in self._lookup_key_prefixes for prefix in group)
        return prefixes, sum(sum(db.block_len) // db.block_size for db in self.token_dbs)

    def probe(self) -> list[tuple[int, float]]:
        """Returns (tokens, seconds) of a small and a larger pull, measured with blocks that are not in use yet."""
        measured, db = [], self.token_dbs[0]
        for blocks in PROBE_BLOCKS:
            keys = [f"{PREFIX}-probe-{os.getpid()}-{block}" for block in range(blocks)]
            pieces = [db.prepare_value_for_block(1 + block) for block in range(blocks)]
            addresses, sizes = [address for address, _ in pieces], [size for _, size in pieces]
            self.store.batch_put_from_multi_buffers(keys, addresses, sizes, self.store_replicate_config)
            began_s = time.monotonic()
            results = self.store.batch_get_into_multi_buffers(keys, addresses, sizes)
            if min(results) >= 0:
                measured.append((blocks * self.block_size, time.monotonic() - began_s))
            self.store.batch_remove(keys)
        self._counts.take()  # a probe is no traffic
        return measured


def block_check(extra: dict) -> Callable[[Register], BlockCheck] | None:
    """Makes the check that `kv_connector_extra_config` selects."""
    if extra["block_check"] == "off":
        return None
    key = mac_key(extra["mac_key_file"]) if extra["block_check"] == "mac" else None
    read = host_bytes if current_platform.is_cpu() else DeviceBytes()
    return lambda register: BlockCheck(register, MAX_PIECES, key, read)


def pool_worker(worker) -> PoolWorker:
    """Returns the worker side of the connector in a vLLM worker, for functions that `collective_rpc` calls there."""
    return get_kv_transfer_group().connector_worker


def layout(worker) -> tuple[tuple[str, ...], int]:
    """Calls `PoolWorker.layout` for `collective_rpc`."""
    return pool_worker(worker).layout()


def rejoin(worker, master_address: str) -> str | None:
    """Calls `PoolWorker.rejoin` for `collective_rpc`. Returns the text of its RuntimeError, or None: after an error
    vLLM leaves the answers of the other ranks to the next call.
    """
    try:
        pool_worker(worker).rejoin(master_address)
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return None


def begin_again(worker, heard: int) -> int:
    """Calls `PoolWorker.begin_again` for `collective_rpc`."""
    return pool_worker(worker).begin_again(heard)


def probe(worker) -> list[tuple[int, float]]:
    """Calls `PoolWorker.probe` for `collective_rpc`."""
    return pool_worker(worker).probe()
