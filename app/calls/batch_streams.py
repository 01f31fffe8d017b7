"""The streams of a client's batches: one after another, until every group of a batch has arrived.

Invariant: a group is yielded once, whatever is lost meanwhile, and a batch whose reader has gone is cancelled.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from uuid import uuid4

from tailrace.app.calls.connection import Connection
from tailrace.app.calls.own_loads import READER_S, OwnLoads
from tailrace.app.calls.refused import RolloutRejected
from tailrace.app.calls.result_texts import ResultTexts
from tailrace.app.calls.resume import Heartbeat, Interrupted, ReceivedGroups, interrupted_by_loss
from tailrace.deployments.messages.rollout import GroupResult, Rejected, RolloutBatch


class BatchStreams:
    """`heartbeat`: renews the lease of a batch while it is read."""

    def __init__(self, connection: Connection, loads: OwnLoads, heartbeat: type[Heartbeat]):
        self._connection, self._loads, self._heartbeat = connection, loads, heartbeat
        self._texts, self.cancelled = ResultTexts(connection.ask), set()  # ids, for the next coordinator

    async def groups(self, batch: RolloutBatch) -> AsyncIterator[GroupResult]:
        """Yields the groups of a batch as they finish, over as many streams as that takes."""
        have: list[str] = []
        self.cancelled.discard(batch.batch_id)
        retries, driver = self._connection.retries(), uuid4().hex
        received = ReceivedGroups(lambda count: self._connection.send("renew", batch.batch_id, driver, count))
        heartbeat = self._heartbeat(received.send)
        try:
            while len(have) < len(batch.groups):
                try:
                    async with aclosing(self._stream(batch, driver, have, retries.is_again)) as groups:
                        async for group in groups:
                            have.append(group.prompt_id)
                            retries.renew()
                            yield group
                            received.add(group)
                    if len(have) < len(batch.groups):
                        raise Interrupted(RolloutRejected("the stream ended before all groups had come"), READER_S)
                except Interrupted as lost:
                    await retries.wait(lost)
        finally:
            heartbeat.stop()

    async def _stream(
        self, batch: RolloutBatch, driver: str, have: list[str], resumed: bool
    ) -> AsyncIterator[GroupResult]:
        """Yields the groups of one stream, without those in `have`. Raises Interrupted if another stream may give the
        rest.

        `driver`: names the call of `groups` over all its streams. `resumed`: this is not its first stream, so a batch
        that was accepted once waits for its quota.
        """
        asked = self._loads.demanding(batch), driver, have, batch.batch_id in self.cancelled
        with interrupted_by_loss():
            async with self._connection.stream("rollout", *asked) as items:
                async for item in items:
                    if isinstance(item, Rejected):
                        raise await self._loads.error_of(item, "rollout", batch, batch.adapters, resumed)
                    await self._texts.attach(item)
                    yield item
