"""Groups that drivers are still to receive, by batch, each batch over one or more submissions to the core.

Invariant: a batch has one reader at a time, which gets each group that it asks for once. A driver that lost its stream
continues with another, and gets the groups that the old one had not delivered. Groups beyond a window of bytes that the
driver has not acknowledged wait here. Called by `Rollouts` and the coordinator.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing

from tailrace.deployments.batches.quotas import BatchLoad, Quotas
from tailrace.deployments.batches.records import GroupRecord
from tailrace.deployments.messages.delivery import WINDOW_BYTES, result_bytes
from tailrace.deployments.messages.liveness import LEASE_S, SILENT_S
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, Rejected, RejectedBy, RolloutBatch, checked


class Delivery:
    """Delivery of one batch. `coming`: prompt ids that are in the core, or not read. `driver`: the reader's client."""

    def __init__(self, message: RolloutBatch, driver: str, now: float):
        self.driver, self.renewed_s = driver, now
        self.coming: set[str] = set()
        self.is_over = self.was_refused = False
        self.batch_id, self._message = message.batch_id, message
        self._groups = {group.prompt_id: group for group in message.groups}
        self._ready: deque[tuple[GroupResult | Rejected, GroupRecord | None]] = deque()
        self._held_bytes = 0  # bytes of the groups in `_ready`
        self._sent: deque[tuple[int, GroupRecord | None]] = deque()  # bytes and record; not acknowledged by the reader
        self._sent_bytes = self._taken = 0  # their sum; groups acknowledged, with those the driver had before
        self._reader = self.cancels = 0  # number of the present reader; calls of `cancel` so far
        self._changed = asyncio.Event()  # wakes the present reader

    def refusal(self, message: RolloutBatch, driver: str, now: float) -> Rejected | None:
        """Returns Rejected if this driver cannot continue to read, else None."""
        name = message.batch_id
        same = (message.seed, message.step) == (self._message.seed, self._message.step)
        if not same or any(self._groups.get(group.prompt_id, group) != group for group in message.groups):
            return Rejected(
                reason=f"batch_id {name!r} is running already, with other prompts or settings; give another"
            )
        if driver != self.driver and now < self.renewed_s + SILENT_S:
            reason = f"batch_id {name!r} is running already, for another driver; give another, or end that driver"
            return Rejected(reason=reason, by=RejectedBy.READER)
        return None

    def load(self) -> BatchLoad:
        """Load of the whole batch, until it has been read."""
        return BatchLoad.of(tuple(self._groups.values()), self._held_bytes + self._sent_bytes)

    def adds(self, message: RolloutBatch) -> bool:
        """Returns whether a message has groups that this batch does not have yet."""
        return any(group.prompt_id not in self._groups for group in message.groups)

    def attach(self, message: RolloutBatch, driver: str, now: float, have: int) -> int:
        """Attaches a reader, whose driver has `have` groups, and ends the one before. Returns its number."""
        self.driver, self.renewed_s = driver, now
        self._sent.clear()
        self._sent_bytes, self._taken = 0, have
        self._groups |= {group.prompt_id: group for group in message.groups}
        self._reader += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return self._reader

    def is_read_by(self, reader: int) -> bool:
        return reader == self._reader

    @property
    def groups(self) -> Collection[PromptGroup]:
        """All groups that drivers have requested."""
        return self._groups.values()

    def unread(self) -> list[GroupRecord]:
        """Returns groups that are finished and not acknowledged by a driver."""
        return [record for _, record in (*self._sent, *self._ready) if record is not None]

    def put(self, item: GroupResult | Rejected, record: GroupRecord | None = None) -> None:
        """Adds a finished group, or the error of a failed batch. `record`: the record of the group."""
        self._ready.append((item, record))
        self._held_bytes += result_bytes(item) if isinstance(item, GroupResult) else 0
        self._changed.set()

    def refuse(self, refused: Rejected) -> None:
        """Ends the batch for its reader with the reason. Its driver may submit it again."""
        self.was_refused = True
        self.put(refused)

    def give(self, group: GroupResult, record: GroupRecord | None) -> None:
        """Records that a group is sent to the driver."""
        self._sent.append((result_bytes(group), record))
        self._sent_bytes += result_bytes(group)

    def acknowledge(self, taken: int) -> None:
        """Records that the driver has received `taken` groups over all its streams. A late call changes nothing."""
        while self._sent and self._taken < taken:
            self._sent_bytes -= self._sent.popleft()[0]
            self._taken += 1
        self._changed.set()

    def end(self) -> None:
        """Closes the delivery and wakes its reader."""
        self.is_over = True
        self._reader += 1
        self._changed.set()

    async def next(self, reader: int, window_bytes: int) -> tuple[GroupResult | Rejected, GroupRecord | None]:
        """Returns the next item with its record, once fewer than `window_bytes` are unacknowledged.

        Returns Rejected once there is another reader.
        """
        while reader == self._reader:
            if self._ready and self._sent_bytes < window_bytes:
                item, record = self._ready.popleft()
                if isinstance(item, GroupResult):
                    self._held_bytes -= result_bytes(item)
                    self.coming.discard(item.prompt_id)
                return item, record
            self._changed.clear()
            await self._changed.wait()
        reason = "the driver was silent for too long, or another one reads on"
        return Rejected(reason=reason, by=RejectedBy.READER), None


class Deliveries:
    """Deliveries by the driver's batch id. `submit`: submits groups to the core; returns Rejected if it refuses them,
    else None. Its number is the delivery's `cancels` at the driver's request: a later cancel ends the groups, too.

    `cancel`: ends a delivery's samples in the core. `refusal`: returns Rejected if a new batch cannot run now, else
    None. `session_loads`: returns the loads of open sessions, which count for the quotas too. `quotas` may be replaced
    at any time; they apply to batches that arrive later.
    """

    def __init__(
        self,
        submit: Callable[[RolloutBatch, Delivery, int], Awaitable[Rejected | None]],
        cancel: Callable[[Delivery], object],
        refusal: Callable[[RolloutBatch], Awaitable[Rejected | None]],
        now: Callable[[], float],
    ):
        self._submit, self._cancel, self._refusal, self._now = submit, cancel, refusal, now
        self.quotas, self.window_bytes = Quotas(), WINDOW_BYTES
        self.session_loads: Callable[[], Mapping[str, BatchLoad]] = dict
        self._open: dict[str, Delivery] = {}
        self._submissions: set[asyncio.Task] = set()

    @property
    def submitting(self) -> int:
        """Number of submissions to the core that are under way."""
        return len(self._submissions)

    def __len__(self):
        return len(self._open)

    def unread(self) -> list[GroupRecord]:
        """Returns the groups of all batches that are finished and not acknowledged by a driver."""
        return [record for delivery in self._open.values() for record in delivery.unread()]

    async def read(
        self, message: RolloutBatch, driver: str, have: Collection[str], cancelled: bool = False
    ) -> AsyncIterator[GroupResult | Rejected]:
        """Yields each group of a batch as it finishes, but for the prompt ids in `have`; or Rejected, as the last item.

        `driver`: the client's name. Closing the stream cancels the batch. A lost stream may be opened again for its
        missing groups, see `Delivery`. `cancelled`: ends them at once, since a stream before was cancelled.
        """
        message = checked(RolloutBatch, message)
        if isinstance(message, Rejected):
            yield message
            return
        refused = await self._refusal(message) if message.batch_id not in self._open else None
        delivery = self._open.get(message.batch_id)
        if delivery is not None:
            refused = delivery.refusal(message, driver, self._now())
        if refused is None and (delivery is None or delivery.adds(message)):
            subject, load = f"batch {message.batch_id!r}", BatchLoad.of(message.groups)
            refused = self.quota_refusal(subject, load, load, besides=message.batch_id)
        if refused is not None:
            yield refused
            return
        if delivery is None:
            delivery = self._open[message.batch_id] = Delivery(message, driver, self._now())
        reader = delivery.attach(message, driver, self._now(), len(have))
        try:
            async with aclosing(self._groups(delivery, reader, message, set(have), cancelled)) as items:
                async for item in items:
                    yield item
        finally:
            if delivery.is_read_by(reader):
                self._close(message.batch_id)

    async def _groups(
        self, delivery: Delivery, reader: int, message: RolloutBatch, have: set[str], cancelled: bool
    ) -> AsyncIterator[GroupResult | Rejected]:
        """Submits the groups that are neither made nor being made, and yields all groups that the message asks for."""
        wanted = {group.prompt_id for group in message.groups} - have
        new = tuple(group for group in message.groups if group.prompt_id in wanted - delivery.coming)
        if new:
            delivery.coming |= {group.prompt_id for group in new}
            added = message.model_copy(update={"groups": new})
            task = asyncio.ensure_future(self._submit_for(delivery, added, -1 if cancelled else delivery.cancels))
            self._submissions.add(task)
            task.add_done_callback(self._submissions.discard)
            await asyncio.shield(task)  # the submission may wait, and another reader may need its groups
        while wanted:
            item, record = await delivery.next(reader, self.window_bytes)
            if isinstance(item, Rejected):
                yield item
                return
            if item.prompt_id in wanted:
                wanted.discard(item.prompt_id)
                delivery.give(item, record)
                yield item

    async def _submit_for(self, delivery: Delivery, message: RolloutBatch, cancels: int) -> None:
        """Submits new groups to the core. If the core refuses them, the delivery's reader gets the reason."""
        refused = await self._submit(message, delivery, cancels)
        if refused is not None:
            delivery.coming -= {group.prompt_id for group in message.groups}
            delivery.refuse(refused)

    def quota_refusal(self, subject: str, load: BatchLoad, whole: BatchLoad, besides: str = "") -> Rejected | None:
        """Returns Rejected if the quotas do not admit `subject` with this load, else None. `whole`: the load of all
        that its driver asks for at once. `besides`: a batch that does not count.
        """
        if (never := self.quotas.size_refusal(subject, whole)) is not None:
            return never
        here = {name: one.load() for name, one in self._open.items() if name != besides}
        for name, one in self.session_loads().items():
            here[name] = here[name] + one if name in here else one  # a session may have the name of a batch
        return self.quotas.refusal(subject, load, here)

    def held_bytes(self) -> dict[str, int]:
        """Returns the bytes of finished groups that drivers have not received, by batch id; no entry for 0."""
        return {name: count for name, one in self._open.items() if (count := one.load().result_bytes)}

    def renew(self, batch_id: str, driver: str, taken: int = 0) -> None:
        """Renews the lease of a batch's driver. `taken`: number of groups that its caller has, over all its streams."""
        if (delivery := self._open.get(batch_id)) is not None and delivery.driver == driver:
            delivery.renewed_s = self._now()
            delivery.acknowledge(taken)

    def cancel(self, batch_id: str) -> bool:
        """Ends a batch: its groups are delivered at once, samples cancelled. Returns False if it is unknown."""
        if (delivery := self._open.get(batch_id)) is not None:
            delivery.cancels += 1
            self._cancel(delivery)
        return delivery is not None

    def cancel_all(self) -> None:
        """Ends all batches, see `cancel`."""
        for batch_id in self._open:
            self.cancel(batch_id)

    def expire(self) -> int:
        """Closes the batches whose drivers are gone. Returns their number."""
        gone = [name for name, one in self._open.items() if self._now() > one.renewed_s + LEASE_S]
        for batch_id in gone:
            self._close(batch_id)
        return len(gone)

    def _close(self, batch_id: str) -> None:
        """Removes a batch that has no reader any more, and cancels its remaining samples."""
        delivery = self._open.pop(batch_id)
        delivery.end()
        self._cancel(delivery)
