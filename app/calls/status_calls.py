"""The client's calls that only look: the service, its longest samples, logs of one sample or batch, the KV pool."""

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
    ServiceStatus,
)


class StatusCalls:
    """`_ask`, `_stream` and `_role` are the client's."""

    async def watch(self) -> AsyncIterator[dict]:
        """Follow the service: its whole state as rows by section and name, then each time the rows that have changed.

        Items have `whole`, `number`, `at_s` (unix seconds) and `sections`; a row that is gone is None. One that reads
        slowly gets the whole state again. Ends by an error of Ray's once the coordinator is lost; call again.
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

    async def status(self) -> ServiceStatus:
        """Replicas, batches, pool and counters, as of the last replica reports."""
        return await self._ask("status")

    status_blocking = blocking(status)

    async def longest_samples(self, count: int = 10) -> tuple[SampleStatus, ...]:
        """The longest unended samples by tokens so far, in falling order: the tail as it forms."""
        return await self._ask("longest_samples", count)

    longest_samples_blocking = blocking(longest_samples)

    async def sample_detail(self, sample_id: str) -> SampleDetail | None:
        """Chunks and text so far of an unended sample, by the id that `longest_samples` gives; None if it has ended."""
        return await self._ask("sample_detail", sample_id)

    sample_detail_blocking = blocking(sample_detail)

    async def sample_log(self, name: str) -> SampleLog | None:
        """Chunks, moves, reasons and faults of a sample, by its id in the core or as BATCH/PROMPT#INDEX; None if the
        service does not know it, or not any more."""
        return await self._ask("sample_log", name)

    sample_log_blocking = blocking(sample_log)

    async def batch_log(self, name: str) -> BatchLog | None:
        """Progress, ends, faults and samples of a batch; None if the service does not know it, or not any more."""
        return await self._ask("batch_log", name)

    batch_log_blocking = blocking(batch_log)

    async def pool_status(self) -> PoolView | None:
        """The coordinator's view of the KV pool, at most a second old, or None if the service has no pool."""
        return (await self.status()).pool

    pool_status_blocking = blocking(pool_status)
