"""Open sessions by name: single samples are requested at any time, and answered as they end.

Invariant: a sample that is requested twice is made once while it is in flight. It ends early only if no caller waits
for it, by its deadline, or with its session. A session whose driver does not renew its lease is closed. Tokens do not
depend on the order of requests. Called by `Rollouts` and the coordinator.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from tailrace.deployments.batches.adapter_book import AdapterBook
from tailrace.deployments.batches.asked_sample import AskedSample
from tailrace.deployments.batches.live_batches import LiveBatches
from tailrace.deployments.batches.open_batch import GroupIdentity, OpenBatch
from tailrace.deployments.batches.prompts import Prepared, Prompts
from tailrace.deployments.batches.quotas import BatchLoad
from tailrace.deployments.batches.records import SampleRecord
from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.liveness import LEASE_S
from tailrace.deployments.messages.rollout import BatchSettings, Rejected, checked
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest, SampleTokens
from tailrace.deployments.telemetry import parse_traceparent
from tailrace.policies.protocol import events as ev

if TYPE_CHECKING:  # it loads Ray, and this class needs none of it
    from tailrace.deployments.context.service import ContextService

IDLE_S = 60.0
"""Seconds for which a group without a running sample is kept: more of its samples may arrive and use its lengths."""


@dataclass(eq=False, slots=True)
class OpenSession:
    settings: BatchSettings
    renewed_s: float
    batch: OpenBatch | None = None  # None while it has nothing in the core
    asked: dict[tuple[GroupIdentity, int, int], AskedSample] = field(default_factory=dict)
    tokens: int = 0  # sum of max_tokens over all requests in flight

    def load(self) -> BatchLoad:
        return BatchLoad(len(self.asked), self.tokens)

    def add(self, asked: AskedSample) -> None:
        """Counts a sample until it is answered."""
        self.asked[asked.key] = asked
        self.tokens += asked.identity.max_tokens
        asked.answer.add_done_callback(lambda _: self._remove(asked))

    def _remove(self, asked: AskedSample) -> None:
        del self.asked[asked.key]
        self.tokens -= asked.identity.max_tokens


class SampleAdmission(Protocol):
    """The coordinator's admission and loop, as far as sessions use them."""

    async def refusal(self, message: BatchSettings) -> Rejected | None:
        """Returns Rejected if a batch cannot run under the present weights, else None."""

    async def admitted(self, batch_id: str, at_once: Callable[[], object]) -> None:
        """Waits for a change of the core that is due, unless `at_once()`."""

    def look_again(self) -> None:
        """Has what waits to be admitted see whether it still has to."""


class SessionLoop(Protocol):
    def now(self) -> float:
        """Seconds on the coordinator's clock."""

    def tell(self, event: ev.Event) -> None:
        """Queues an event for the core's next turn."""


class OpenSessions:
    """`quota`: returns Rejected if a named load, or the load of all that is requested with it, is beyond the quotas.
    `observe`: gives the core an event at once; returns Rejected if it refuses it.
    """

    def __init__(
        self,
        prompts: Prompts,
        context: "ContextService | None",
        batches: LiveBatches,
        adapters: AdapterBook,
        admission: SampleAdmission,
        loop: SessionLoop,
        quota: Callable[[str, BatchLoad, BatchLoad], Rejected | None],
        observe: Callable[[ev.Event], Rejected | None],
    ):
        self._prompts, self._context, self._batches, self._adapters = prompts, context, batches, adapters
        self._admission, self._loop, self._quota, self._observe = admission, loop, quota, observe
        self._sessions: dict[str, OpenSession] = {}
        self._submissions: set[asyncio.Task] = set()
        self._in_turn = ThreadPoolExecutor(1, "features")  # mates after the first have no data of their own

    @property
    def submitting(self) -> int:
        """Number of submissions to the core that are under way."""
        return len(self._submissions)

    def __len__(self):
        return len(self._sessions)

    def loads(self) -> dict[str, BatchLoad]:
        return {name: session.load() for name, session in self._sessions.items()}

    # ---- called by drivers -------------------------------------------------------------------------

    async def generate(self, settings: BatchSettings, request: SampleRequest) -> SampleAnswer | Rejected:
        """Returns one sample, once it has ended. The first deadline of a caller that passes ends the sample for all of
        them. When a caller leaves, the sample ends if no other caller waits.
        """
        asked = await self._asked(settings, request)
        if isinstance(asked, Rejected):
            return asked
        with self._waited_for(asked, request.deadline_s):
            return await asyncio.shield(asked.answer)

    async def stream(self, settings: BatchSettings, request: SampleRequest) -> AsyncIterator[SampleTokens | Rejected]:
        """Yields the tokens of the same sample as its chunks end; see `AskedSample.stream`."""
        asked = await self._asked(settings, request)
        if isinstance(asked, Rejected):
            yield asked
            return
        with self._waited_for(asked, request.deadline_s):
            async for item in asked.stream():
                yield item

    async def _asked(self, settings: BatchSettings, request: SampleRequest) -> AskedSample | Rejected:
        """Returns the sample of a request, which is submitted unless it is in flight. A sample that is being cancelled
        ends first, cut short; this caller gets a whole one, made again.
        """
        settings, request = checked(BatchSettings, settings), checked(SampleRequest, request)
        for message in (settings, request):
            if isinstance(message, Rejected):
                return message
        if (refused := await self._admission.refusal(settings)) is not None:
            return refused
        thread = None if request.group.features is None else self._in_turn
        prepared = await asyncio.get_running_loop().run_in_executor(thread, self._prompts.prepare_group, request.group)
        if not isinstance(prepared, Rejected):
            prepared = self._adapters.bound(prepared, settings.min_adapter_versions)
        if isinstance(prepared, Rejected):
            return prepared
        key = GroupIdentity.of(prepared), request.index, request.turn
        while not isinstance(session := self._session(settings), Rejected):
            asked = session.asked.get(key)
            if asked is None:
                return self._ask(session, settings, prepared, request)
            if not asked.is_cancelled:
                asked.join(settings)
                return asked
            await asyncio.wait([asked.answer])
        return session

    def _session(self, settings: BatchSettings) -> OpenSession | Rejected:
        name = settings.batch_id
        session = self._sessions.get(name)
        if session is None:
            try:  # the core takes a sample before its spans are opened
                settings.traceparent is None or parse_traceparent(settings.traceparent)
            except ValueError as error:
                return Rejected(reason=f"session {name!r}: {error}")
            session = self._sessions[name] = OpenSession(settings, self._loop.now())
        if (unlike := differing(session.settings, settings)) is not None:
            return Rejected(reason=f"session {name!r} is open with another {unlike}; give another batch_id")
        session.renewed_s = self._loop.now()
        return session

    def _ask(
        self, session: OpenSession, settings: BatchSettings, prepared: Prepared, request: SampleRequest
    ) -> AskedSample | Rejected:
        asks = "a sample" if request.together == 1 else "a request"
        whole = BatchLoad(request.together, request.together * prepared.max_tokens)
        subject = f"{asks} of session {session.settings.batch_id!r}"
        if (refused := self._quota(subject, BatchLoad(1, prepared.max_tokens), whole)) is not None:
            return refused
        identity = GroupIdentity.of(prepared)
        answer = asyncio.get_running_loop().create_future()
        asked = AskedSample(settings, identity, request.index, request.turn, answer)
        session.add(asked)
        task = asyncio.ensure_future(self._submit(session, asked, prepared, request))
        self._submissions.add(task)
        task.add_done_callback(self._submissions.discard)
        return asked

    async def _submit(
        self, session: OpenSession, asked: AskedSample, prepared: Prepared, request: SampleRequest
    ) -> None:
        try:
            keys = [prepared.prompt_key]
            past = await self._context.lengths(keys) if self._context is not None else {}
            await self._admission.admitted(session.settings.batch_id, lambda: asked.is_cancelled)
            refused = await self._admission.refusal(asked.settings)  # they may have changed meanwhile
            refused = refused or self._give(session, asked, prepared, request, past.get(prepared.prompt_key, []))
        except Exception as error:  # noqa: BLE001 - one request's error: its callers must receive it
            refused = Rejected(reason=f"session {session.settings.batch_id!r}: {error!r}")
        if refused is not None:
            asked.give(refused)

    def _give(
        self, session: OpenSession, asked: AskedSample, prepared: Prepared, request: SampleRequest, past: list
    ) -> Rejected | None:
        """Submits a sample, or its next turn, to the core. Returns Rejected if it refuses it, else None."""
        if self._sessions.get(session.settings.batch_id) is not session:
            return Rejected(reason=f"session {session.settings.batch_id!r} has been closed")
        batch, follows = session.batch, None
        if batch is not None and batch.is_open:
            if (sample_id := batch.turn(prepared, request, asked.give, self._observe, self._loop.now())) is not None:
                self._taken(asked, sample_id, batch.samples[sample_id])
                return None
            if request.branches:
                follows = batch.held.nearest(prepared, request)
            else:
                follows = self._end_held(batch, request.group.prompt_id, request.index)
        if batch is None or not batch.is_open:  # also if an error has just ended it
            core_id = self._batches.new_core_id(session.settings.batch_id)
            batch = OpenBatch(session.settings, core_id, self._loop.now())
        new = batch.plan(prepared, request, past)
        spec = replace(new.spec, follows=follows)
        if (refused := self._observe(batch.addition([spec], self._loop.now()))) is not None:
            return refused
        if session.batch is not batch:
            session.batch = batch
            self._batches.add(batch)
        record = batch.take(new, prepared, request, asked.give, self._loop.now())
        self._batches.add_sample(batch, new.group.group_id, new.sample_id)
        self._taken(asked, new.sample_id, record)
        return None

    def _end_held(self, batch: OpenBatch, name: str | None = None, index: int | None = None) -> str | None:
        """Ends samples between two turns; only those of one group or one index, if given. No request continues them
        meanwhile: the end would be that of its turn. Returns the last one, which has not ended before the next event.
        """
        ended = None
        for ended in batch.held.of(name, index):
            batch.held.drop(ended, batch.samples[ended])
            self._loop.tell(ev.SampleCancelled(self._loop.now(), ended))
        return ended

    def _taken(self, asked: AskedSample, sample_id: str, record: SampleRecord) -> None:
        asked.take(sample_id, record)
        if asked.is_cancelled:
            self._cancel(asked)

    @contextlib.contextmanager
    def _waited_for(self, asked: AskedSample, deadline_s: float | None):
        """Counts one more caller of a sample. Its deadline ends the sample, and so does its leaving if it is the
        last.
        """
        timer = None
        if deadline_s is not None:
            timer = asyncio.get_running_loop().call_later(deadline_s, self._cancel, asked)
        asked.waiting += 1
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            asked.waiting -= 1
            if not asked.waiting and not asked.answer.done():  # its last caller has left
                self._cancel(asked)

    def _cancel(self, asked: AskedSample) -> None:
        asked.is_cancelled = True
        if asked.sample_id is None:
            self._admission.look_again()
        elif not asked.answer.done():
            self._loop.tell(ev.SampleCancelled(self._loop.now(), asked.sample_id))

    def cancel(self, name: str, group: str | None, index: int | None) -> int:
        """Ends the samples in flight of a session, of one of its groups, or one sample: they are answered with their
        tokens so far. Samples between two turns end too. Returns the number in flight.
        """
        session = self._sessions.get(name)
        if session is not None and session.batch is not None:
            self._end_held(session.batch, group, index)
        found = [
            asked
            for asked in (session.asked.values() if session else ())
            if group in (None, asked.identity.name) and index in (None, asked.index)
        ]
        for asked in found:
            self._cancel(asked)
        return len(found)

    def refuse(self, refusal: Callable[[BatchSettings], Rejected | None]) -> None:
        """Ends the samples in flight that `refusal` refuses. Those that are not in the core yet ask it on their way."""
        for session in self._sessions.values():
            for asked in [one for one in session.asked.values() if one.sample_id is not None]:
                if (refused := refusal(asked.settings)) is not None:
                    self._cancel(asked)
                    asked.give(refused)

    def end_trajectory(self, name: str, group: str, index: int, is_last: bool) -> None:
        """Ends the samples of a trajectory. `is_last`: no other one of its group is open, so that the KV of the group's
        prompts is released once nothing of it runs.
        """
        self.cancel(name, group, index)
        session = self._sessions.get(name)
        if is_last and session is not None and session.batch is not None:
            session.batch.expect_no_more(group)

    def call(self, name: str, request: tuple[str, int, int], tool: str) -> None:
        """Tells the core the tool that a held sample's last turn has called. `request`: group, index and turn."""
        session = self._sessions.get(name)
        if session is None or session.batch is None:
            return
        group, index, turn = request
        key = sample_key(session.settings.seed, session.settings.step, group, index, turn)
        for sample_id in session.batch.held.of(group, index):
            if session.batch.samples[sample_id].key == key:
                self._loop.tell(ev.ToolCalled(self._loop.now(), sample_id, tool))

    def renew(self, name: str) -> bool:
        """Renews the lease of a session's driver. Returns False if there is no such session."""
        session = self._sessions.get(name)
        if session is not None:
            session.renewed_s = self._loop.now()
        return session is not None

    def close(self, name: str) -> bool:
        """Ends a session and its samples in flight. Returns False if there is no such session."""
        session = self._sessions.pop(name, None)
        if session is None:
            return False
        for asked in session.asked.values():
            asked.is_cancelled = True
        self._admission.look_again()
        if session.batch is not None and session.batch.is_open:
            self._end_batch(session)
        return True

    def _end_batch(self, session: OpenSession) -> None:
        """Closes the session's batch in the core, which cancels samples in flight."""
        batch, session.batch = session.batch, None
        batch.close()
        self._observe(ev.BatchCancelled(self._loop.now(), batch.core_id))
        if batch.over:
            self._batches.drop(batch)

    # ---- called by the coordinator's loop ------------------------------------------------------------

    def sweep(self, hasty: bool) -> int:
        """Closes idle groups, batches without a group, and sessions whose drivers are gone. Returns the number of those
        sessions.

        `hasty`: a change of the core is due, which waits until nothing is in flight.
        """
        now = self._loop.now()
        gone = [name for name, one in self._sessions.items() if now > one.renewed_s + LEASE_S]
        for name in gone:
            self.close(name)
        for session in self._sessions.values():
            if session.batch is not None:
                if hasty:
                    self._end_held(session.batch)
                self._rest(session, now - (0.0 if hasty else IDLE_S))
        return len(gone)

    def _rest(self, session: OpenSession, before_s: float) -> None:
        batch = session.batch
        if not batch.is_open:  # ended by an error
            session.batch = None
            return
        if specs := batch.close_idle(before_s):
            self._observe(batch.addition(specs, self._loop.now()))
        if not batch.groups:
            self._end_batch(session)


def differing(one: BatchSettings, other: BatchSettings) -> str | None:
    """Returns the first setting by which two requests cannot belong to one session, or None."""
    return next(
        (name for name in ("seed", "step", "priority", "share") if getattr(one, name) != getattr(other, name)), None
    )
