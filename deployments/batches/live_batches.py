"""Every submission in flight: finds it by the ids of its samples and groups, ends it, and delivers its groups.

Invariant: a submission is here from `add` until its last group is emitted or it has failed. The group context is
notified of each group's end. Called by `Rollouts` alone.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tailrace.deployments.batches.adapter_book import AdapterBook
from tailrace.deployments.batches.deliveries import Delivery
from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.batches.records import GroupRecord, escaped
from tailrace.deployments.batches.token_log import TokenLog
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import Rejected, RolloutBatch
from tailrace.deployments.messages.status import BatchStatus, SampleDetail
from tailrace.deployments.telemetry import Telemetry, parse_traceparent
from tailrace.policies.protocol.actions import EmitGroup, EndSample, EndTurn, SampleEnd

if TYPE_CHECKING:  # it loads Ray, and this class needs none of it
    from tailrace.deployments.context.service import ContextService


class KnownWeights(Protocol):
    """Knowledge of the replicas' weights, see `Weights`."""

    async def reported(self) -> None: ...

    def may_have_been(self, version: int, digest: str) -> bool: ...


class LiveBatches:
    """`nonce`: unique among the application's coordinators, past and present. `now`: their clock, in seconds."""

    def __init__(
        self,
        prompts: Prompts,
        context: "ContextService | None",
        telemetry: Telemetry,
        token_log: TokenLog,
        weights: KnownWeights,
        adapters: AdapterBook,
        nonce: str,
        now: Callable[[], float],
    ):
        self._token_log, self._weights, self._adapters = token_log, weights, adapters
        self._prompts, self._context, self._telemetry = prompts, context, telemetry
        self._nonce, self._now, self._submissions = nonce, now, 0
        self._batches: dict[str, LiveBatch] = {}  # by their ids in the core
        self._home: dict[str, LiveBatch] = {}  # id of an unended sample or of a group -> its batch

    def __len__(self):
        return len(self._batches)

    async def prepare(self, message: RolloutBatch, delivery: Delivery) -> LiveBatch | Rejected:
        """Encodes a message's prompts and finds past lengths. Returns Rejected if it cannot be submitted."""
        try:
            prepared = await asyncio.to_thread(self._prompts.prepare, message)
            if message.traceparent is not None:
                parse_traceparent(message.traceparent)
        except Exception as error:  # noqa: BLE001 - one message's error: it must not reach others
            return Rejected(reason=f"batch {message.batch_id!r}: {one_line(error)}")
        if isinstance(prepared, Rejected):
            return prepared
        prepared = [self._adapters.bound(one, message.min_adapter_versions) for one in prepared]
        if (refused := next((one for one in prepared if isinstance(one, Rejected)), None)) is not None:
            return refused
        past = await self._context.lengths([one.prompt_key for one in prepared]) if self._context is not None else {}
        batch = LiveBatch(
            message=message,
            core_id=self.new_core_id(message.batch_id),
            delivery=delivery,
            prepared=prepared,
            past=past,
            submitted_s=self._now(),
        )
        if found := await self._token_log.read(message, delivery.groups):
            await self._weights.reported()  # a new coordinator may not know the weights yet
            if refused := batch.resume(found, self._weights.may_have_been):
                self._token_log.note("other_weights", f"batch {message.batch_id!r}: {refused} records do not fit")
        return batch

    def new_core_id(self, batch_id: str) -> str:
        """Returns a name in the core that no other submission has or has had."""
        self._submissions += 1
        return f"{escaped(batch_id, '/')}~{self._nonce}{self._submissions}"

    def groups(self) -> list[GroupRecord]:
        """Returns the unfinished groups of batches that have a driver."""
        live = (batch for batch in self._batches.values() if batch.is_logged)
        return [group for batch in live for group in batch.groups.values()]

    def add(self, batch: LiveBatch) -> None:
        """Adds a batch that the core has taken."""
        batch.open_spans(self._telemetry, Path(self._prompts.model).name)
        self._batches[batch.core_id] = batch
        self._home.update(dict.fromkeys([*batch.samples, *batch.groups], batch))

    def add_sample(self, batch: LiveBatch, group_id: str, sample_id: str) -> None:
        """Adds a sample that the core has taken to a batch that is here, in a new group or in a known one."""
        if group_id not in self._home:
            batch.open_group_span(group_id)
        self._home[group_id] = self._home[sample_id] = batch

    def drop(self, batch: LiveBatch) -> None:
        """Removes a batch whose groups have all been delivered, if it is here."""
        if self._batches.pop(batch.core_id, None) is not None:
            batch.spans.close()

    def of(self, name: str) -> LiveBatch:
        """Returns the submission of an unended sample, or of a group, by its id."""
        return self._home[name]

    def detail(self, sample_id: str, more: np.ndarray | None = None) -> SampleDetail | None:
        """Returns an unended sample's detail, or None if there is none. `more`: tokens of its running chunk."""
        batch = self._home.get(sample_id)
        record = None if batch is None else batch.samples.get(sample_id)
        return None if record is None else record.detail(sample_id, self._prompts, more)

    def core_ids(self, delivery: Delivery) -> list[str]:
        """Returns the ids, in the core, of a delivery's submissions."""
        return [batch.core_id for batch in self._batches.values() if batch.delivery is delivery]

    def end(self, action: EndSample, version: int) -> int:
        """Ends a sample. Returns the versions by which its turn's tokens are older than `version`, summed over them."""
        batch = self._home.pop(action.sample_id)
        sample = batch.end(action, self._now())
        batch.answer(action.sample_id, self._prompts)
        if self._context is not None and action.end in (SampleEnd.STOP, SampleEnd.LENGTH):
            self._context.finish(sample.group.ref, batch.message.step, [sample.answer()])
        return sample.count_updates(version)

    def end_turn(self, action: EndTurn, version: int) -> int:
        batch = self._home[action.sample_id]
        batch.end_turn(action, self._now())
        batch.answer(action.sample_id, self._prompts)
        return batch.samples[action.sample_id].count_updates(version)

    def emit(self, action: EmitGroup) -> LiveBatch | None:
        """Delivers a group. Returns its batch if that was the last group."""
        batch = self._home.pop(action.group_id)
        group = batch.emit(action.group_id)
        batch.hand_out(group, self._prompts)
        if self._context is not None:
            self._context.end(group.ref)
        if batch.over:
            self.drop(batch)
            return batch
        return None

    def all(self) -> Collection[LiveBatch]:
        return self._batches.values()

    def fail(self, reason: str) -> None:
        """Ends all submissions with a reason."""
        for batch in self._batches.values():
            batch.fail(f"batch {batch.message.batch_id!r} was ended by an error: {reason}")
            for group in batch.groups.values() if self._context is not None else ():
                self._context.end(group.ref)
        self._batches.clear()
        self._home.clear()

    def statuses(self, unix_s: float, tokens: Mapping[str, int]) -> tuple[BatchStatus, ...]:
        """Returns the status of each submission. `tokens`: by its id in the core; see `LiveBatch.status`."""
        now_s = self._now()
        return tuple(batch.status(now_s, unix_s, tokens.get(name, 0)) for name, batch in self._batches.items())

    def counts(self) -> dict[str, int]:
        return {"submissions": len(self._batches), "samples_and_groups": len(self._home)}
