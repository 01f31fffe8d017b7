"""What a client has loaded into the service: each request demands it, and a service that has lost it gets it again.

Invariant: a request never runs under lower weights or adapters than those that this client has loaded.
"""

from collections.abc import Iterable
from typing import TypeVar

from tailrace.app.calls.own_adapters import OwnAdapters
from tailrace.app.calls.own_weights import OwnWeights
from tailrace.app.calls.refused import error_of
from tailrace.app.calls.resume import Interrupted
from tailrace.deployments.messages.rollout import BatchSettings, Rejected, RejectedBy

READER_S = 20.0
"""Seconds for which a batch id that another driver reads is requested again: that driver may be gone."""

Settings = TypeVar("Settings", bound=BatchSettings)


class OwnLoads:
    """`weights`, `adapters`: those that this client has loaded."""

    def __init__(self, weights: OwnWeights, adapters: OwnAdapters):
        self._weights, self._adapters = weights, adapters

    def demanding(self, settings: Settings) -> Settings:
        """Returns the settings with the lowest weights and adapters that the service must hold."""
        lowest = max(settings.min_weights_version, self._weights.version)
        adapters = self._adapters.min_versions(settings.min_adapter_versions)
        return settings.model_copy(update={"min_weights_version": lowest, "min_adapter_versions": adapters})

    async def error_of(
        self, refusal: Rejected, call: str, asked: BatchSettings, adapters: Iterable[str | None], resumed: bool
    ) -> Exception:
        """Returns the error to raise for a refused request: Interrupted if it is to be made again.

        A service that was restarted gets this client's weights and `adapters` (those that the request names) before.
        `asked`: the caller's settings, without this client's demands, which may fall: a restarted service counts the
        versions of an adapter from 1. `resumed`: the request was accepted once, so it waits for its quota.
        """
        error = error_of(refusal, call)
        match refusal.by:
            case RejectedBy.WEIGHTS:
                again = await self._weights.restore(asked.weights_version, asked.min_weights_version)
            case RejectedBy.ADAPTER:
                again = await self._adapters.restore(adapters, asked.min_adapter_versions)
            case RejectedBy.READER:
                return Interrupted(error, READER_S)
            case cause:
                again = resumed and cause is RejectedBy.QUOTA
        return Interrupted(error) if again else error
