"""`RolloutClient`: an RL driver's handle to the service. Thin over the coordinator's DeploymentHandle.

    async for group in client.rollout(batch): ...        or        for group in client.rollout_blocking(batch): ...
    answer = await client.open(seed=7).generate(text=...)        single samples, see `app.calls.session`

Groups come as they finish. Closing the iterator cancels the batch, and so does a driver that is gone for a minute.
Every call has a blocking twin, `NAME_blocking`. Raises RolloutRejected if the service refuses the batch, Ray's errors
if the service itself stays lost, and PermissionError if the client's role has no right to the call.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from uuid import uuid4

from opentelemetry.trace import SpanKind

from tailrace.app.calls.adapter_calls import AdapterCalls
from tailrace.app.calls.blocking import blocking, blocking_iterator
from tailrace.app.calls.otlp import otlp_wanted
from tailrace.app.calls.refused import (
    PoliciesRejected,
    QuotaExceeded,
    RolloutRejected,
    TooLargeForQuota,
    UnknownAdapter,
    WeightsRejected,
)
from tailrace.app.calls.result_texts import ResultTexts
from tailrace.app.calls.resume import Heartbeat, Interrupted, Patience, Taken, lost_service
from tailrace.app.calls.session_calls import SessionCalls
from tailrace.app.calls.status_calls import StatusCalls
from tailrace.app.calls.weights_calls import WeightsCalls
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.roles import NotAdmitted, Role
from tailrace.deployments.messages.rollout import GroupResult, Rejected, RejectedBy, RolloutBatch, WeightsLoaded
from tailrace.deployments.messages.status import PoolView, ReplicasChanged
from tailrace.deployments.telemetry import MAX_TRACES, Telemetry, traceparent
from tailrace.policies.families.registry import Policies

READER_S = 20.0
"""Seconds for which a batch id that another driver reads is requested again: that driver may be gone."""


class RolloutClient(StatusCalls, SessionCalls, WeightsCalls, AdapterCalls):
    """`app_name`: the Serve application on the cluster that `ray.init` has connected this process to.

    `resume_s`: seconds for which a call waits for a lost coordinator; then it raises Ray's error. `role`: a trainer may
    do everything; an evaluator may roll out and read the status; an observer may read the status alone. `handle`: the
    application's handle, if available; then its name does not count.
    """

    def __init__(
        self,
        app_name: str = "tailrace",
        telemetry: Telemetry | None = None,
        resume_s: float = 600.0,
        handle=None,
        heartbeat: type[Heartbeat] = Heartbeat,
        role: Role | str = Role.TRAINER,
    ):
        self._role = Role(role)
        if handle is None:
            from ray import serve

            handle = serve.get_app_handle(app_name)
        self._handle, self._resume_s, self._heartbeat = handle, resume_s, heartbeat
        self._app_name = app_name
        self._journaling: Heartbeat | None = None
        self._stream = self._handle.options(stream=True)
        self._telemetry = telemetry or Telemetry("tailrace-driver", otlp_wanted())
        self._traces: dict[str, str] = {}  # batch id -> trace id, of batches whose spans are kept
        self._weights: tuple[int, str, str] | None = None  # version, folder and digest of this client's last update
        self._adapters: dict[str, Adapter] = {}
        self._texts = ResultTexts(self._ask)

    async def rollout(self, batch: RolloutBatch) -> AsyncIterator[GroupResult]:
        """Rolls out a batch. Yields each group as it finishes, in any order.

        Continues after the coordinator was lost: missing groups are made again, with the same tokens. A batch is never
        rolled out under a lower weights version than this client's last update.
        """
        attributes = {"id": batch.batch_id, "groups": len(batch.groups)}
        attributes = {f"tailrace.batch.{name}": value for name, value in attributes.items()}
        span = self._telemetry.span(
            "driver",
            batch.traceparent,
            attributes={**attributes, "tailrace.step": batch.step},
            keep=batch.keep_trace,
            kind=SpanKind.CLIENT,
        )
        if batch.keep_trace:
            self._traces[batch.batch_id] = f"{span.get_span_context().trace_id:032x}"
            if len(self._traces) > MAX_TRACES:
                del self._traces[next(iter(self._traces))]
        sent = batch.model_copy(update={"traceparent": traceparent(span) or batch.traceparent})
        have: list[str] = []
        resumed = False
        patience, driver = Patience(self._resume_s), uuid4().hex
        taken = Taken(lambda count: self._handle.renew.remote(self._role, batch.batch_id, driver, count))
        heartbeat = self._heartbeat(taken.send)
        try:
            while len(have) < len(batch.groups):
                try:
                    async with aclosing(self._groups(sent, driver, have, resumed)) as groups:
                        async for group in groups:
                            have.append(group.prompt_id)
                            patience.renew()
                            yield group
                            taken.add(group)
                    if len(have) < len(batch.groups):
                        raise Interrupted(RolloutRejected("the stream ended before all groups had come"), READER_S)
                except Interrupted as lost:
                    resumed = True
                    await patience.wait(lost)
        finally:
            heartbeat.stop()
            span.end()

    rollout_blocking = blocking_iterator(rollout)

    async def _groups(
        self, batch: RolloutBatch, driver: str, have: list[str], resumed: bool
    ) -> AsyncIterator[GroupResult]:
        """Yields the groups of one stream, without those in `have`. Raises Interrupted if another stream may give the
        rest.

        `driver`: names the call of `rollout` over all its streams. `resumed`: this is not its first stream, so a batch
        that was accepted once waits for its quota.
        """
        version = self._weights[0] if self._weights else 0
        lowest = {"min_weights_version": max(batch.min_weights_version, version)}
        sent = batch.model_copy(update=lowest | {"min_adapter_versions": self._min_adapter_versions(batch)})
        stream = self._stream.rollout.remote(self._role, sent, driver, have)
        try:
            async for item in stream:
                if not isinstance(_admitted(item), Rejected):
                    await self._texts.attach(item)
                    yield item
                elif item.by is RejectedBy.WEIGHTS and self._weights and sent.weights_version in (None, version):
                    await self.update_weights(*self._weights)  # the service was restarted
                    raise Interrupted(RolloutRejected(item.reason))
                elif item.by is RejectedBy.ADAPTER:
                    unknown = UnknownAdapter(item.reason)
                    raise Interrupted(unknown) if await self._load_again(batch.adapters) else unknown
                elif item.by is RejectedBy.READER:
                    raise Interrupted(RolloutRejected(item.reason), READER_S)
                elif item.by is RejectedBy.QUOTA:
                    raise Interrupted(QuotaExceeded(item.reason)) if resumed else QuotaExceeded(item.reason)
                else:
                    raise (TooLargeForQuota if item.by is RejectedBy.SIZE else RolloutRejected)(item.reason)
        except lost_service() as error:
            raise Interrupted(error) from error
        finally:
            stream.cancel()  # else the batch would run to its end without a reader

    async def _ask(self, method: str, *arguments):
        """Calls the coordinator, again and again while it is lost: each of these calls may be repeated."""
        patience = Patience(self._resume_s)
        while True:
            try:
                return _admitted(await getattr(self._handle, method).remote(self._role, *arguments))
            except lost_service() as error:
                await patience.wait(Interrupted(error))

    async def cancel(self, batch_id: str) -> bool:
        """Ends a batch. Its iterator then yields the tokens made so far. Returns False if no such batch is in
        flight.
        """
        return await self._ask("cancel", batch_id)

    cancel_blocking = blocking(cancel)

    async def update_weights(self, version: int, source: str, digest: str = "") -> WeightsLoaded:
        """Loads the safetensors folder `source` on every replica. Samples in flight continue under `version`.
        `send_weights` does the same without a folder.

        `version` must not be below the current one. The current one with the same content changes nothing, so a call
        may be repeated. `digest`: the intended content's digest, from an earlier `WeightsLoaded`; empty for any. Raises
        WeightsRejected, with the reason, if the update failed.
        """
        answer = await self._ask("update_weights", version, source, digest)
        if isinstance(answer, Rejected):
            raise WeightsRejected(answer.reason)
        if self._weights is None or version >= self._weights[0]:  # else a later update was answered before this one
            self._weights = version, source, answer.digest
        return answer

    update_weights_blocking = blocking(update_weights)

    async def record_rewards(self, group: GroupResult, rewards: Mapping[int, float] | Sequence[float]) -> None:
        """Records the rewards of a group's samples, by sample index. Drafts of later epochs follow the better answers.

        Best effort: rewards are kept if the service keeps history; the call does not wait for the write.
        """
        known = dict(rewards) if isinstance(rewards, Mapping) else dict(enumerate(rewards))
        await self._ask("record_rewards", group.prompt_key, group.step, known)

    record_rewards_blocking = blocking(record_rewards)

    async def forget_history(self) -> int:
        """Deletes the answers of all earlier epochs, on disk too. Returns their number."""
        return await self._ask("forget_history")

    forget_history_blocking = blocking(forget_history)

    async def inspect_group(self, name: str) -> dict | None:
        """Returns the group context's entry for a group id, prompt id or prompt key, or None if it has none."""
        return await self._ask("inspect_group", name)

    inspect_group_blocking = blocking(inspect_group)

    async def pool_detail(self) -> PoolView | None:
        """Returns the pool's status with the number of keys per weights version, counted for this call."""
        return await self._ask("pool_detail")

    pool_detail_blocking = blocking(pool_detail)

    async def drain_pool(self) -> int | None:
        """Empties the pool. Returns the number of removed keys, or None if the service has no pool."""
        return await self._ask("drain_pool")

    drain_pool_blocking = blocking(drain_pool)

    async def set_policies(self, policies: Policies) -> None:
        """Switches to other policies as soon as no batch is in flight.

        They are sent by name and knobs. Raises PoliciesRejected if the service cannot make them, or may not: a policy
        of your own must be of a package in the deployment's `allowed_code`.
        """
        answer = await self._ask("set_policies", policies.model_dump(mode="json"))
        if isinstance(answer, Rejected):
            raise PoliciesRejected(answer.reason)

    set_policies_blocking = blocking(set_policies)

    async def journal(self, on: bool) -> str | None:
        """Turns the journal of the core's events and actions on or off, as soon as no batch is in flight.

        Returns the journal so far under the current policies, as JSON lines, or None if there is none. Journaling ends
        a minute after this process.
        """
        if self._journaling is not None:
            self._journaling.stop()
        answer = await self._ask("journal", on)
        if on:
            self._journaling = self._heartbeat(lambda: self._handle.renew_journal.remote(self._role))
        return answer

    journal_blocking = blocking(journal)

    async def replica_changes(self) -> AsyncIterator[ReplicasChanged]:
        """Yields the number of engine replicas that are up and wanted: now, then at each change, until it is closed.

        Resources of replicas given back are free for Ray once `replicas` equals `wanted`.
        """
        changes = self._stream.replica_changes.remote(self._role)
        try:
            async for change in changes:
                yield _admitted(change)
        finally:
            changes.cancel()  # else the coordinator's stream never ends, and it has 20 s to end before it is killed

    replica_changes_blocking = blocking_iterator(replica_changes)

    async def reserve(self, replicas: int) -> None:
        """Requests at least `replicas` replicas until the next batch arrives.

        Engines that were given back take seconds to minutes to start; a call before the step hides that time. The
        limits of the configuration hold.
        """
        await self._ask("reserve", replicas)

    reserve_blocking = blocking(reserve)

    async def reset_caches(self) -> bool:
        """Drops the KV of ended chunks on every replica. Returns False if one keeps it, because chunks run there.

        For benchmarks, between batches.
        """
        return await self._ask("reset_caches")

    reset_caches_blocking = blocking(reset_caches)

    async def take_trace(self, batch_id: str) -> list[dict]:
        """Returns the spans of a batch that this client rolled out with `keep_trace`: the driver's and the
        service's.
        """
        trace_id = self._traces.pop(batch_id)
        return self._telemetry.take(trace_id) + await self._ask("take_spans", trace_id)

    take_trace_blocking = blocking(take_trace)


def _admitted(answer):
    """Returns the answer itself. Raises PermissionError if it is a refusal of this client's role."""
    if isinstance(answer, NotAdmitted):
        raise PermissionError(answer.reason)
    return answer
