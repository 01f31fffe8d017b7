"""The coordinator's read-only calls. A base of the deployment's class."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from tailrace.deployments.feed.survey import Survey
from tailrace.deployments.messages.roles import Role, admits
from tailrace.deployments.messages.rollout import Rejected
from tailrace.deployments.messages.status import BatchLog, SampleDetail, SampleLog, ServiceSnapshot


class WatchCalls:
    """`_rollouts` belongs to the coordinator."""

    _rollouts: Any

    @admits(Role.OBSERVER)
    async def watch(self, epoch: str, number: int) -> AsyncIterator[bytes | Rejected]:
        """See `Feed.follow`."""
        async with aclosing(self._rollouts.feed.follow(epoch, number)) as items:
            async for item in items:
                yield item

    @admits(Role.OBSERVER)
    async def status(self, longest: int = 0) -> ServiceSnapshot:
        """Returns a snapshot. `longest`: number of the longest samples in it."""
        return self._rollouts.status(Survey(count=longest, part=None))

    @admits(Role.OBSERVER)
    async def sample_log(self, name: str) -> SampleLog | None:
        return self._rollouts.logs.sample(name)

    @admits(Role.OBSERVER)
    async def batch_log(self, name: str) -> BatchLog | None:
        return self._rollouts.logs.batch(name)

    @admits(Role.EVALUATOR)
    async def sample_detail(self, sample_id: str) -> SampleDetail | None:
        return await self._rollouts.sample_detail(sample_id)
