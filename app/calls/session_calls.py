"""The client's calls of open sessions, which survive the coordinator's loss. `RolloutSession` makes their requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from uuid import uuid4

from tailrace.app.calls.blocking import blocking, blocking_iterator
from tailrace.app.calls.refused import (
    QuotaExceeded,
    RolloutRejected,
    StreamBroken,
    TooLargeForQuota,
    UnknownAdapter,
)
from tailrace.app.calls.resume import Interrupted, Patience, lost_service
from tailrace.app.calls.session import RolloutSession
from tailrace.deployments.messages.roles import NotAdmitted
from tailrace.deployments.messages.rollout import BatchSettings, Rejected, RejectedBy
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest, SampleTokens


class SessionCalls:
    """`_handle`, `_role`, `_resume_s`, `_heartbeat`, `_weights`, `_ask`, `update_weights`, `_load_again` and
    `_min_adapter_versions` belong to the client.
    """

    def open(self, batch_id: str | None = None, **settings) -> RolloutSession:
        """Opens a session: single samples, requested at any time; see `tailrace.app.calls.session`.

        `batch_id`: by default a new name. `settings`: those of a RolloutBatch without groups, such as `seed`, `step`,
        `priority`, `share`. Raises ValueError for others.
        """
        name = f"session-{uuid4().hex[:12]}" if batch_id is None else batch_id
        return RolloutSession(self, BatchSettings(batch_id=name, **settings), self._heartbeat)

    async def generate(self, settings: BatchSettings, request: SampleRequest) -> SampleAnswer:
        """Generates one sample of a session; `RolloutSession.generate` makes the request. Survives the coordinator's
        loss.
        """
        patience, resumed = Patience(self._resume_s), False
        while True:
            try:
                return await self._generate_once(settings, request, resumed)
            except Interrupted as lost:
                resumed = True
                await patience.wait(lost)

    generate_blocking = blocking(generate)

    async def _generate_once(self, settings: BatchSettings, request: SampleRequest, resumed: bool) -> SampleAnswer:
        sent = self._sent(settings)
        call = self._handle.generate.remote(self._role, sent, request)
        try:
            answer = await call
        except lost_service() as error:
            raise Interrupted(error) from error
        except asyncio.CancelledError:
            call.cancel()  # else the sample would run to its end without a reader
            raise
        return await self._taken(answer, sent, resumed, request.group.adapter)

    async def stream(self, settings: BatchSettings, request: SampleRequest) -> AsyncIterator[SampleTokens]:
        """Yields one sample of a session as its chunks end; `RolloutSession.stream` makes the request."""
        patience, given, is_begun, is_whole = Patience(self._resume_s), [], False, False
        while not is_whole:
            try:
                async with aclosing(self._stream_once(settings, request, is_begun)) as items:
                    async for item in items:
                        part = _beyond(given, item)
                        if part.token_ids or part.answer or not is_begun:
                            is_begun = True
                            given += part.token_ids
                            patience.renew()
                            yield part
                        is_whole = part.answer is not None  # the call itself ends after it, without a cancel
                if not is_whole:
                    raise Interrupted(StreamBroken("the stream ended before the sample"))
            except Interrupted as lost:
                await patience.wait(lost)

    stream_blocking = blocking_iterator(stream)

    async def _stream_once(
        self, settings: BatchSettings, request: SampleRequest, resumed: bool
    ) -> AsyncIterator[SampleTokens]:
        sent = self._sent(settings)
        stream = self._stream.stream_sample.remote(self._role, sent, request)
        try:
            async for item in stream:
                yield await self._taken(item, sent, resumed, request.group.adapter)
        except lost_service() as error:
            raise Interrupted(error) from error
        finally:
            stream.cancel()  # else the sample would run to its end without a reader

    def _sent(self, settings: BatchSettings) -> BatchSettings:
        """Returns the settings for the coordinator: it must not hold older weights than this client's last update."""
        version = self._weights[0] if self._weights else 0
        lowest = {"min_weights_version": max(settings.min_weights_version, version)}
        return settings.model_copy(update=lowest | {"min_adapter_versions": self._min_adapter_versions(settings)})

    async def _taken(self, answer, sent: BatchSettings, resumed: bool, adapter: str | None):
        """Returns the answer itself. Raises an error for a refusal, Interrupted if the call may be repeated."""
        if isinstance(answer, NotAdmitted):
            raise PermissionError(answer.reason)
        if not isinstance(answer, Rejected):
            return answer
        version = self._weights[0] if self._weights else 0
        if answer.by is RejectedBy.WEIGHTS and self._weights and sent.weights_version in (None, version):
            await self.update_weights(*self._weights)  # the service was restarted
            raise Interrupted(RolloutRejected(answer.reason))
        if answer.by is RejectedBy.ADAPTER:
            unknown = UnknownAdapter(answer.reason)
            raise Interrupted(unknown) if await self._load_again([adapter]) else unknown
        if answer.by is RejectedBy.QUOTA:
            raise Interrupted(QuotaExceeded(answer.reason)) if resumed else QuotaExceeded(answer.reason)
        raise (TooLargeForQuota if answer.by is RejectedBy.SIZE else RolloutRejected)(answer.reason)

    async def cancel_samples(self, session: str, group: str | None, index: int | None) -> int:
        """Ends samples of a session, see `RolloutSession.cancel`."""
        return await self._ask("cancel_samples", session, group, index)

    cancel_samples_blocking = blocking(cancel_samples)

    def renew_session(self, session: str) -> object:
        """Renews the session's lease. Does not wait for an answer."""
        return self._handle.renew_session.remote(self._role, session)

    async def close_session(self, session: str) -> bool:
        """Ends a session, see `RolloutSession.close`. Returns False if it has ended."""
        return await self._ask("close_session", session)

    close_session_blocking = blocking(close_session)


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
