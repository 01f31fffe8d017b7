"""The client's read-only calls: the service, its longest samples, logs of one sample or batch, the KV pool."""

import json
from collections.abc import AsyncIterator

from tailrace.app.calls.blocking import blocking, blocking_iterator
from tailrace.app.calls.refused import RolloutRejected
from tailrace.deployments.messages.roles import NotAdmitted
from tailrace.deployments.messages.rollout import Rejected
from tailrace.deployments.messages.status import (
    BatchLog,
    PoolView,
    SampleDetail,
    SampleLog,
    SampleStatus,
    ServiceSnapshot,
)


class StatusCalls:
    """`_ask`, `_stream` and `_role` belong to the client."""

    async def watch(self) -> AsyncIterator[dict]:
        """Follows the service: its whole state as rows by section and name, then each time the rows that have changed.

        Items have `whole`, `number`, `at_s` (unix seconds) and `sections`; a removed row is None. A slow reader gets
        the whole state again. Ends by an error of Ray's once the coordinator is lost; call again.
        """
        epoch, number = "", 0
        while True:
            items = self._stream.watch.remote(self._role, epoch, number)
            try:
                async for item in items:
                    if isinstance(item, NotAdmitted):
                        raise PermissionError(item.reason)
                    if isinstance(item, Rejected):
                        raise RolloutRejected(item.reason)
                    delta = json.loads(item)
                    epoch, number = delta["epoch"], delta["number"]
                    yield delta
            finally:
                items.cancel()

    watch_blocking = blocking_iterator(watch)

    async def status(self, longest: int = 0) -> ServiceSnapshot:
        """Returns the service at one moment: replicas, batches, pool and counters, as of the last replica reports.

        `longest`: number of the longest unended samples in it.
        """
        return await self._ask("status", longest)

    status_blocking = blocking(status)

    async def longest_samples(self, count: int = 10) -> tuple[SampleStatus, ...]:
        """Returns the longest unended samples by tokens so far, longest first: the tail as it forms."""
        return (await self.status(count)).longest

    longest_samples_blocking = blocking(longest_samples)

    async def sample_detail(self, sample_id: str) -> SampleDetail | None:
        """Returns chunks and text so far of an unended sample, by its id in `longest_samples`; None if it has ended."""
        return await self._ask("sample_detail", sample_id)

    sample_detail_blocking = blocking(sample_detail)

    async def sample_log(self, name: str) -> SampleLog | None:
        """Returns chunks, moves, reasons and faults of a sample, by its id in the core or as BATCH/PROMPT#INDEX; None
        if the service does not know it, or not any more.
        """
        return await self._ask("sample_log", name)

    sample_log_blocking = blocking(sample_log)

    async def batch_log(self, name: str) -> BatchLog | None:
        """Returns progress, ends, faults and samples of a batch; None if the service does not know it, or not any
        more.
        """
        return await self._ask("batch_log", name)

    batch_log_blocking = blocking(batch_log)

    async def pool_status(self) -> PoolView | None:
        """Returns the coordinator's view of the KV pool, at most a second old, or None if the service has no pool."""
        return (await self.status()).pool

    pool_status_blocking = blocking(pool_status)
