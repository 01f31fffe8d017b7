"""The connector's scheduler side: looks up, pulls and saves KV for each request, and records the outcome.

A request states its wishes in `kv_transfer_params` (the first fields of `Traffic`). Invariants: in a step the scheduler
waits at most LOOKUP_WAIT_S for the look-up of each new request; a request is looked up once and pulled once; KV is
saved when a request ends, if the request will be continued; blocks that a transfer reads or writes stay pinned until
every rank has reported it. Built by `kvpool.connector`, called by vLLM.
"""

import time
from collections import Counter
from concurrent.futures import TimeoutError as NotYet

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import LoadSpec
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import MooncakeStoreScheduler
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.request import RequestStatus

from tailrace.kvpool.counts import bucket_ms
from tailrace.kvpool.keys import block_name
from tailrace.kvpool.traffic import Traffic
from tailrace.kvpool.worker import PoolWorkerMetadata, SaveOfEnded

LOOKUP_WAIT_S = 0.003
"""Maximum seconds to wait for a request's lookup in one step. A healthy one takes 0.5 ms over loopback."""


class PoolScheduler(MooncakeStoreScheduler):
    """Deadlines come from `kv_connector_extra_config`, in seconds."""

    def __init__(self, vllm_config, kv_cache_config):
        super().__init__(vllm_config, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._lookup_deadline_s, self._retry_s = extra["lookup_deadline_s"], extra["retry_s"]
        self._paused_until_s = 0.0
        self._traffic: dict[str, Traffic] = {}
        self._jobs: dict[int, tuple[str, int]] = {}  # store job -> its request, ranks yet to report
        self._saved_tokens: dict[int, int] = {}  # store job -> tokens saved, minimum over ranks
        self._pinned_loads: dict[str, tuple[list[int], int]] = {}  # request -> blocks, ranks yet to report
        self.counts: Counter = Counter()
        self.pulls: list[tuple[int, float]] = []  # (tokens, seconds), until `take_pulls`
        self.scheduled: tuple[int, int] = (0, 0)  # tokens and requests of the step last built
        self._meta, self._built = None, 0  # the metadata last built, and its number
        self.heard = 0  # number of the metadata that the last report followed

    # ---- called by the engine ----------------------------------------------------------------------

    def settled(self, request_id: str) -> bool:
        """Returns whether every save of the request has ended, well or badly."""
        return request_id not in self._traffic or not self._traffic[request_id].jobs

    def forgo(self, request_id: str) -> None:
        """Cancels the save at the end of a request, if it is not under way."""
        if request_id in self._traffic:
            self._traffic[request_id].save = False

    def take(self, request_id: str) -> Traffic | None:
        """Removes and returns the record of a request that has ended. None for a request without a wish."""
        traffic = self._traffic.pop(request_id, None)
        if traffic is not None and traffic.jobs:
            self._pause()  # its saves are late, and others would wait behind them
        return traffic

    # ---- pulling -----------------------------------------------------------------------------------

    def on_new_request(self, request) -> None:
        wish = request.kv_transfer_params
        if wish is not None:
            self._traffic[request.request_id] = Traffic(**wish)

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the tokens beyond `num_computed_tokens` to pull; None if not known until the next step."""
        traffic = self._traffic.get(request.request_id)
        if traffic is None or traffic.min_pull_tokens is None or traffic.pulled_tokens:
            return 0, False
        least = max(traffic.min_pull_tokens, self._block_size)
        most = (request.num_tokens - 1) // self._block_size * self._block_size - num_computed_tokens
        if most < least:
            traffic.cause = "tail" if most < self._block_size else "below_min"
            return 0, False
        if traffic.hit_tokens is None and not self._look_up(request, traffic):
            return None, False
        found = traffic.hit_tokens - num_computed_tokens
        if found < least:
            if found > 0:
                traffic.cause = "below_min"
            return 0, False
        self.load_specs[request.request_id] = LoadSpec(num_computed_tokens, traffic.hit_tokens, can_load=False)
        return found, True

    def _look_up(self, request, traffic: Traffic) -> bool:
        """Looks up how much of the request the pool has. Returns True once `traffic.hit_tokens` is known or 0."""
        now_s = time.monotonic()
        if traffic.answer is None:
            if now_s < self._paused_until_s:
                return self._give_up(traffic, "paused")
            names = self._names(request.block_hashes, traffic.version)
            traffic.asked_s = now_s
            traffic.answer = self.client.executor.submit(self.client._lookup, request.num_tokens, names)
        try:
            result = traffic.answer.result(timeout=LOOKUP_WAIT_S if traffic.asked_s == now_s else 0)
        except NotYet:
            if now_s - traffic.asked_s < self._lookup_deadline_s:
                return False
            traffic.answer.cancel()
            self.counts[f"lookup_wait_ms.{bucket_ms(now_s - traffic.asked_s)}"] += 1
            self._pause()
            return self._give_up(traffic, "lookup_late")
        traffic.hit_tokens = result.hit_length
        traffic.cause = "tail" if result.hit_length else "miss"
        self.counts[f"lookup_wait_ms.{bucket_ms(time.monotonic() - traffic.asked_s)}"] += 1
        return True

    def _pause(self) -> None:
        self._paused_until_s = time.monotonic() + self._retry_s

    def _give_up(self, traffic: Traffic, cause: str) -> bool:
        traffic.hit_tokens, traffic.cause = 0, cause
        return True

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        """Pins the blocks that will be written by the load, until it has returned."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not num_external_tokens:
            return
        traffic = self._traffic[request.request_id]
        traffic.pulled_tokens = num_external_tokens
        last = traffic.hit_tokens // self._block_size
        first = (traffic.hit_tokens - num_external_tokens) // self._block_size
        groups = blocks.get_block_ids(group_ids=self._store_group_ids)
        self._pin(block_ids := [block for group in groups for block in group[first:last]])
        self._pinned_loads[request.request_id] = (block_ids, self._num_workers)

    # ---- saving ------------------------------------------------------------------------------------

    def request_ended(self, request, block_ids: tuple[list[int], ...]) -> None:
        """Queues the save of all computed blocks if the request will be continued."""
        traffic = self._traffic.get(request.request_id)
        if traffic is None:
            return
        # A step in flight counts as computed, with drafts that may be wrong; hashes are of tokens that have come.
        blocks = min(request.num_computed_tokens // self._block_size, len(block_ids[0]), len(request.block_hashes))
        traffic.names = tuple(self._names(request.block_hashes, traffic.version)[:blocks])
        loading = request.request_id in self._pinned_loads  # its tokens are not there yet
        # A stop token: it is not continued, unless by a further turn.
        stopped = request.status is RequestStatus.FINISHED_STOPPED and not traffic.save_stopped
        if not (traffic.save and blocks) or stopped or loading:
            return
        if time.monotonic() < self._paused_until_s:
            self.counts["save_failed.paused"] += blocks
            return
        pinned = [block for group in block_ids for block in group[:blocks] if block != NULL_BLOCK_ID]
        job = SaveOfEnded(
            req_id=request.request_id,
            token_len_chunk=blocks * self._block_size,
            block_ids=tuple(block_ids[group].copy() for group in self._store_group_ids),
            block_hashes=list(traffic.names),
            can_save=True,
            prefill_end_tokens=blocks * self._block_size,
            store_job_id=self._next_store_job_id,
        )
        self._next_store_job_id += 1
        self._pin(pinned)
        self._pinned_saves[job.store_job_id] = (pinned, self._num_workers)
        self._save_begun(job)  # now, not at the next step: a call in between must not find it settled
        self._finished_partial_tail_metas[request.request_id] = job  # vLLM's way to submit a save after the end

    def build_connector_meta(self, scheduler_output):
        scheduled = scheduler_output.num_scheduled_tokens
        self.scheduled = (sum(scheduled.values()), len(scheduled))
        self._meta = super().build_connector_meta(scheduler_output)
        self._built = self._meta.step = self._built + 1
        return self._meta

    def begin_again(self, begun: int) -> set[str]:
        """Takes back the metadata of a step that raised before the workers, which have `begun` this one, had received
        it.

        Returns the requests that wait for loads which never began.
        """
        meta, self._meta, lost = self._meta, None, set()
        if meta is None or meta.step <= begun:
            return lost
        for job in meta.requests:
            if isinstance(job, SaveOfEnded):
                self._finished_partial_tail_metas[job.req_id] = job  # for the next step
            elif job.store_job_id is not None:
                self._unpin(self._pinned_saves.pop(job.store_job_id, ((), 0))[0])
                self._save_ended(job.store_job_id, self._num_workers)
            if job.load_spec is not None and job.req_id in self._pinned_loads:
                self._unpin(self._pinned_loads.pop(job.req_id)[0])
                lost.add(job.req_id)
        return lost

    def _reference_save_blocks(self, meta) -> None:
        """Replaces vLLM's last step of building metadata: names get their version, and unwanted saves are dropped."""
        kept = []
        for job in meta.requests:
            traffic = self._traffic.get(job.req_id)
            if job.store_job_id is None:  # a load, or a save that vLLM requests as a prompt is computed
                if traffic is None or (job.can_save and not traffic.save_prompt):
                    continue
                job.block_hashes = self._names(job.block_hashes, traffic.version)
            kept.append(job)
        meta.requests = kept
        super()._reference_save_blocks(meta)
        for job in kept:
            if job.can_save and job.store_job_id in self._pinned_saves and job.store_job_id not in self._jobs:
                self._save_begun(job)

    def _save_begun(self, job) -> None:
        self._jobs[job.store_job_id] = (job.req_id, self._num_workers)
        if job.req_id in self._traffic:
            self._traffic[job.req_id].jobs += 1

    # ---- outcomes ----------------------------------------------------------------------------------

    def update_connector_output(self, connector_output) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, PoolWorkerMetadata):
            return
        self.heard = max(self.heard, report.step)
        self.counts += report.counts
        self.pulls += report.pulls
        for job, tokens in report.saved_tokens.items():
            self._saved_tokens[job] = min(tokens, self._saved_tokens.get(job, tokens))
        for job, ranks in report.completed_saves.items():
            self._save_ended(job, ranks)
        if "late" in report.failed_loads.values():
            self._pause()
        for request_id, failure in report.failed_loads.items():
            if request_id in self._traffic:
                self._traffic[request_id].cause = f"pull_{failure}"
                self._traffic[request_id].hit_tokens = 0
        for request_id, ranks in report.returned_loads.items():
            block_ids, left = self._pinned_loads.pop(request_id)
            if left > ranks:
                self._pinned_loads[request_id] = (block_ids, left - ranks)
            else:
                self._unpin(block_ids)

    def _save_ended(self, job: int, ranks: int) -> None:
        request_id, left = self._jobs.pop(job, (None, ranks))
        if left > ranks:
            self._jobs[job] = (request_id, left - ranks)
            return
        tokens = self._saved_tokens.pop(job, 0)
        self.counts["saved_tokens"] += tokens
        if (traffic := self._traffic.get(request_id)) is not None:
            traffic.jobs -= 1
            traffic.saved_tokens = max(traffic.saved_tokens, tokens)

    def has_pending_push_work(self) -> bool:
        return super().has_pending_push_work() or bool(self._pinned_loads)

    def _names(self, hashes, version: int) -> list[bytes]:
        return [block_name(version, block_hash) for block_hash in hashes]

    def _pin(self, block_ids: list[int]) -> None:
        self._gpu_block_pool.touch([self._gpu_block_pool.blocks[block] for block in block_ids])

    def _unpin(self, block_ids: list[int]) -> None:
        self._gpu_block_pool.free_blocks(self._gpu_block_pool.blocks[block] for block in reversed(block_ids))
