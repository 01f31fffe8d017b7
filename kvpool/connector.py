"""The KV connector that vLLM loads by dotted path: its own Mooncake connector with our scheduler and worker sides.

Invariant: the pool is a cache. Whatever happens to it, a request ends, and with the same tokens. One class on CPU and
GPU. `launch.py` names it; the stepper reads the outcome of each request from it (`settled`, `take`, `counts`).
"""

from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector

from tailrace.kvpool.scheduler import PoolScheduler
from tailrace.kvpool.traffic import Traffic
from tailrace.kvpool.worker import PoolWorker


class PoolConnector(MooncakeStoreConnector):
    """Each engine has two: one in vLLM's scheduler, one in every worker."""

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config=None):
        KVConnectorBase_V1.__init__(self, vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._validate_kv_cache_config(vllm_config, kv_cache_config)
        self.kv_role = vllm_config.kv_transfer_config.kv_role
        self._kv_cache_config = kv_cache_config
        self._kv_cache_events = self.connector_scheduler = self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = PoolScheduler(vllm_config, kv_cache_config)
        else:
            self.connector_worker = PoolWorker(vllm_config, kv_cache_config)

    def bind_connector_metadata(self, connector_metadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.connector_worker.begin(connector_metadata)

    def on_new_request(self, request) -> None:
        self.connector_scheduler.on_new_request(request)

    def request_finished_all_groups(self, request, block_ids) -> tuple[bool, dict | None]:
        self.connector_scheduler.request_ended(request, block_ids)
        return False, None

    def keep_beside(self, blocks) -> None:
        """Calls `PoolWorker.keep_beside`."""
        self.connector_worker.keep_beside(blocks)

    def reset_cache(self) -> bool | None:
        """Does nothing: the pool is shared, and keys carry their version. vLLM would empty it for all engines."""
        return True if self.role == KVConnectorRole.SCHEDULER else None

    def forgo(self, request_id: str) -> None:
        """Cancels the save at the end of this request: it will not be continued."""
        self.connector_scheduler.forgo(request_id)

    def begin_again(self, begun: int) -> set[str]:
        """Calls `PoolScheduler.begin_again`."""
        return self.connector_scheduler.begin_again(begun)

    @property
    def heard(self) -> int:
        """Number of the step of the last report."""
        return self.connector_scheduler.heard

    def settled(self, request_id: str) -> bool:
        return self.connector_scheduler.settled(request_id)

    def take(self, request_id: str) -> Traffic | None:
        return self.connector_scheduler.take(request_id)

    @property
    def counts(self) -> Counter:
        """All counts so far on all ranks, by `EVENT.CAUSE`."""
        return self.connector_scheduler.counts

    def take_pulls(self) -> list[tuple[int, float]]:
        """Returns (tokens, seconds) of every successful pull since the last call."""
        pulls, self.connector_scheduler.pulls = self.connector_scheduler.pulls, []
        return pulls

    @property
    def scheduled(self) -> tuple[int, int]:
        """Tokens and requests of the last step."""
        return self.connector_scheduler.scheduled
