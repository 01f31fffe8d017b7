"""`RolloutClient`: an RL driver's handle to the service. Thin over the coordinator's DeploymentHandle.

    async for group in client.rollout(batch): ...        or        for group in client.rollout_blocking(batch): ...

Groups come as they finish. Dropping the iterator cancels the batch. Every call has a blocking twin, `NAME_blocking`.
Raises RolloutRejected if the service refuses the batch, and Ray's errors if the service itself is lost.
"""

from collections.abc import AsyncIterator, Mapping, Sequence

from tailrace.app.blocking import blocking, blocking_iterator
from tailrace.app.config import otlp_wanted
from tailrace.deployments.messages.rollout import GroupResult, Rejected, RolloutBatch, WeightsLoaded
from tailrace.deployments.messages.status import PoolView, ReplicasChanged, ServiceStatus
from tailrace.deployments.telemetry import Telemetry, traceparent
from tailrace.policies.families.registry import Policies


class RolloutRejected(ValueError):
    """The service refused the batch. The text names the fault and its mend."""


class WeightsRejected(ValueError):
    """The weights were not updated. The text says why."""


class RolloutClient:
    """`app_name`: the Serve application on the cluster that `ray.init` has connected this process to."""

    def __init__(self, app_name: str = "tailrace", telemetry: Telemetry | None = None):
        from ray import serve

        self._handle = serve.get_app_handle(app_name)
        self._stream = self._handle.options(stream=True)
        self._telemetry = telemetry or Telemetry("tailrace-driver", otlp_wanted())
        self._traces: dict[str, str] = {}  # batch id -> trace id, of batches whose spans are kept

    async def rollout(self, batch: RolloutBatch) -> AsyncIterator[GroupResult]:
        """Roll out a batch. Yields each group as it finishes, in any order."""
        attributes = {"batch_id": batch.batch_id, "groups": len(batch.groups), "step": batch.step}
        span = self._telemetry.span("driver", batch.traceparent, attributes=attributes, keep=batch.keep_trace)
        if batch.keep_trace:
            self._traces[batch.batch_id] = f"{span.get_span_context().trace_id:032x}"
        sent = batch.model_copy(update={"traceparent": traceparent(span) or batch.traceparent})
        try:
            async for item in self._stream.rollout.remote(sent):
                if isinstance(item, Rejected):
                    raise RolloutRejected(item.reason)
                yield item
        finally:
            span.end()

    rollout_blocking = blocking_iterator(rollout)

    async def cancel(self, batch_id: str) -> bool:
        """End a batch. Its iterator then yields the tokens made so far. Returns False if no such batch is in flight."""
        return await self._handle.cancel.remote(batch_id)

    cancel_blocking = blocking(cancel)

    async def update_weights(self, version: int, source: str) -> WeightsLoaded:
        """Load the safetensors folder `source` on every replica. Samples in flight continue under `version`.

        `version` must be above the current one. Raises WeightsRejected, with the reason, if the update failed.
        """
        answer = await self._handle.update_weights.remote(version, source)
        if isinstance(answer, Rejected):
            raise WeightsRejected(answer.reason)
        return answer

    update_weights_blocking = blocking(update_weights)

    async def status(self) -> ServiceStatus:
        """Replicas, batches, pool and counters, as of the last replica reports."""
        return await self._handle.status.remote()

    status_blocking = blocking(status)

    async def pool_status(self) -> PoolView | None:
        """The coordinator's view of the KV pool, at most a second old, or None if the service has no pool."""
        return (await self.status()).pool

    pool_status_blocking = blocking(pool_status)

    async def record_rewards(self, group: GroupResult, rewards: Mapping[int, float] | Sequence[float]) -> None:
        """Record the rewards of a group's samples, by sample index. Drafts of later epochs follow the better answers.

        Best effort: rewards are kept if the service keeps history; the call does not wait for the write.
        """
        known = dict(rewards) if isinstance(rewards, Mapping) else dict(enumerate(rewards))
        await self._handle.record_rewards.remote(group.prompt_key, group.step, known)

    record_rewards_blocking = blocking(record_rewards)

    async def forget_history(self) -> int:
        """Forget the answers of all earlier epochs, on disk too. Returns their number."""
        return await self._handle.forget_history.remote()

    forget_history_blocking = blocking(forget_history)

    async def inspect_group(self, name: str) -> dict | None:
        """The group context's entry for a group id, prompt id or prompt key, or None if it has none."""
        return await self._handle.inspect_group.remote(name)

    inspect_group_blocking = blocking(inspect_group)

    async def pool_detail(self) -> PoolView | None:
        """The pool's status with the number of keys per weights version, counted for this call."""
        return await self._handle.pool_detail.remote()

    pool_detail_blocking = blocking(pool_detail)

    async def drain_pool(self) -> int | None:
        """Empty the pool. Returns the number of removed keys, or None if the service has no pool."""
        return await self._handle.drain_pool.remote()

    drain_pool_blocking = blocking(drain_pool)

    async def set_policies(self, policies: Policies) -> None:
        """Switch to other policies as soon as no batch is in flight."""
        await self._handle.set_policies.remote(policies)

    set_policies_blocking = blocking(set_policies)

    async def journal(self, on: bool) -> str | None:
        """Turn the journal of the core's events and actions on or off, as soon as no batch is in flight.

        Returns the journal so far under the current policies, as JSON lines, or None if there is none.
        """
        return await self._handle.journal.remote(on)

    journal_blocking = blocking(journal)

    async def replica_changes(self) -> AsyncIterator[ReplicasChanged]:
        """Follow the number of engine replicas that are up and wanted: now, then at each change, until it is dropped.

        Resources of replicas given back are free for Ray once `replicas` equals `wanted`.
        """
        changes = self._stream.replica_changes.remote()
        try:
            async for change in changes:
                yield change
        finally:
            changes.cancel()  # or the coordinator follows for ever, and has 20 s to end before it is killed

    replica_changes_blocking = blocking_iterator(replica_changes)

    async def reserve(self, replicas: int) -> None:
        """Ask for at least `replicas` replicas until the next batch comes.

        Engines that were given back take seconds to minutes to start; a call before the step hides that time. The
        limits of the configuration hold.
        """
        await self._handle.reserve.remote(replicas)

    reserve_blocking = blocking(reserve)

    async def reset_caches(self) -> None:
        """Drop the KV of ended chunks on every replica. For benchmarks, between batches."""
        await self._handle.reset_caches.remote()

    reset_caches_blocking = blocking(reset_caches)

    async def take_trace(self, batch_id: str) -> list[dict]:
        """The spans of a batch that this client rolled out with `keep_trace`: the driver's and the service's."""
        trace_id = self._traces.pop(batch_id)
        return self._telemetry.take(trace_id) + await self._handle.take_spans.remote(trace_id)

    take_trace_blocking = blocking(take_trace)
