"""The coordinator's read-only calls. A base of the deployment's class."""

from typing import Any

from tailrace.deployments.feed.survey import Survey
from tailrace.deployments.messages.roles import Passed, Role, admits
from tailrace.deployments.messages.status import ServiceSnapshot


class WatchCalls:
    """`_rollouts` belongs to the coordinator."""

    _rollouts: Any

    watch = Passed(Role.OBSERVER, lambda me: me._rollouts.feed.follow, is_stream=True)
    sample_log = Passed(Role.OBSERVER, lambda me: me._rollouts.logs.sample)
    batch_log = Passed(Role.OBSERVER, lambda me: me._rollouts.logs.batch)
    sample_detail = Passed(Role.EVALUATOR, lambda me: me._rollouts.logs.detail)

    @admits(Role.OBSERVER)
    async def status(self, longest: int = 0) -> ServiceSnapshot:
        """Returns a snapshot. `longest`: number of the longest samples in it."""
        return self._rollouts.status(Survey(count=longest, part=None))
