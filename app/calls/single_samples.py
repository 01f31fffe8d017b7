"""Single samples over a handle: the calls that a `RolloutSession` makes, which survive the coordinator's loss."""

import asyncio
from collections.abc import AsyncIterator, Set
from contextlib import aclosing

from tailrace.app.calls.connection import Connection
from tailrace.app.calls.own_loads import OwnLoads
from tailrace.app.calls.refused import FeatureDataMissing, StreamBroken
from tailrace.app.calls.resume import Interrupted, interrupted_by_loss
from tailrace.deployments.messages.rollout import BatchSettings, Rejected
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest, SampleTokens


class SingleSamples:
    """See the module docstring. `settings` of a call name its session. `had`: names of items of prompts' features that
    the service has had: their data are sent only if it asks for them.
    """

    def __init__(self, connection: Connection, loads: OwnLoads, had: Set[str] = frozenset()):
        self._connection, self._loads, self._had = connection, loads, had

    def after(self, had: Set[str]) -> "SingleSamples":
        """Returns the calls of a client whose service has had these items."""
        return SingleSamples(self._connection, self._loads, had)

    async def generate(self, settings: BatchSettings, request: SampleRequest) -> SampleAnswer:
        """Generates one sample. Cancelling the call ends the sample."""
        retries, resumed, sent = self._connection.retries(), False, request.without_data(self._had)
        while True:
            try:
                return await self._generate_once(settings, sent, resumed)
            except FeatureDataMissing:
                if sent is request:
                    raise
                sent = request
            except Interrupted as lost:
                resumed = True
                await retries.wait(lost)

    async def _generate_once(self, settings: BatchSettings, request: SampleRequest, resumed: bool) -> SampleAnswer:
        sent = self._loads.demanding(settings)
        call = self._connection.send("generate", sent, request)
        try:
            with interrupted_by_loss():
                answer = await call
        except asyncio.CancelledError:
            call.cancel()  # else the sample would run to its end without a reader
            raise
        if isinstance(answer, Rejected):
            raise await self._loads.error_of(answer, "generate", settings, [request.group.adapter], resumed)
        return answer

    async def stream(self, settings: BatchSettings, request: SampleRequest) -> AsyncIterator[SampleTokens]:
        """Yields one sample as its chunks end. Closing the iterator ends the sample."""
        retries, given, is_begun, is_whole = self._connection.retries(), [], False, False
        sent = request.without_data(self._had)
        while not is_whole:
            try:
                async with aclosing(self._stream_once(settings, sent, is_begun)) as items:
                    async for item in items:
                        part = _beyond(given, item)
                        if part.token_ids or part.answer or not is_begun:
                            is_begun = True
                            given += part.token_ids
                            retries.renew()
                            yield part
                        is_whole = part.answer is not None  # the call itself ends after it, without a cancel
                if not is_whole:
                    raise Interrupted(StreamBroken("the stream ended before the sample"))
            except FeatureDataMissing:
                if sent is request:
                    raise
                sent = request
            except Interrupted as lost:
                await retries.wait(lost)

    async def _stream_once(
        self, settings: BatchSettings, request: SampleRequest, resumed: bool
    ) -> AsyncIterator[SampleTokens]:
        sent = self._loads.demanding(settings)
        with interrupted_by_loss():
            async with self._connection.stream("stream_sample", sent, request) as items:
                async for item in items:
                    if isinstance(item, Rejected):
                        adapters = [request.group.adapter]
                        raise await self._loads.error_of(item, "stream_sample", settings, adapters, resumed)
                    yield item

    async def cancel(self, session: str, group: str | None, index: int | None) -> int:
        """Ends samples of a session, see `RolloutSession.cancel`."""
        return await self._connection.ask("cancel_samples", session, group, index)

    def renew(self, session: str) -> object:
        """Renews the session's lease. Does not wait for an answer."""
        return self._connection.send("renew_session", session)

    async def close(self, session: str) -> bool:
        """Ends a session, see `RolloutSession.close`. Returns False if it has ended."""
        return await self._connection.ask("close_session", session)


def _beyond(given: list[int], item: SampleTokens) -> SampleTokens:
    """Returns the part of an item that has not been yielded. Raises StreamBroken if it has other tokens at earlier
    positions.
    """
    known = min(len(given) - item.start, len(item.token_ids))
    whole = item.answer.sample.token_ids[: len(given)] if item.answer else given
    if known < 0 or tuple(given[item.start : item.start + known]) != item.token_ids[:known] or [*whole] != given:
        raise StreamBroken(
            "the coordinator was lost, and the sample has other tokens now: the weights have changed, it has ended "
            "early, or engines at exactness law have parted; ask for it again"
        )
    return item.beyond(len(given))
