"""The client's calls that only look: the service, its longest samples, one of them, the KV pool."""

from tailrace.app.calls.blocking import blocking
from tailrace.deployments.messages.status import PoolView, SampleDetail, SampleStatus, ServiceStatus


class StatusCalls:
    """`_ask` is the client's."""

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

    async def pool_status(self) -> PoolView | None:
        """The coordinator's view of the KV pool, at most a second old, or None if the service has no pool."""
        return (await self.status()).pool

    pool_status_blocking = blocking(pool_status)
