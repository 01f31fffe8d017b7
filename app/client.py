"""`RolloutClient`: what an RL driver holds. Thin over the coordinator's DeploymentHandle.

    async for group in client.rollout(batch): ...        or        for group in client.rollout_blocking(batch): ...

Groups come as they finish. Dropping the iterator cancels the batch. Raises RolloutRejected when the service does
not take the batch, and what Ray raises when the service itself is lost.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from queue import Queue

from tailrace.app.config import otlp_wanted
from tailrace.deployments.messages.rollout import GroupResult, Rejected, RolloutBatch, WeightsLoaded
from tailrace.deployments.messages.status import PoolView, ReplicasChanged, ServiceStatus
from tailrace.deployments.telemetry import Telemetry, traceparent
from tailrace.policies.families.registry import Policies


class RolloutRejected(ValueError):
    """The batch was not taken; the text names what is wrong and how to mend it."""


class WeightsRejected(ValueError):
    """The weights were not updated; the text says why."""


class RolloutClient:
    """`app_name`: the Serve application on the cluster that `ray.init` has connected this process to."""

    def __init__(self, app_name: str = "tailrace", telemetry: Telemetry | None = None):
        from ray import serve

        self._handle = serve.get_app_handle(app_name)
        self._stream = self._handle.options(stream=True)
        self._telemetry = telemetry or Telemetry("tailrace-driver", otlp_wanted())
        self._traces: dict[str, str] = {}  # batch id -> trace id, of batches whose spans are kept

    async def rollout(self, batch: RolloutBatch) -> AsyncIterator[GroupResult]:
        """Each group of the batch as it finishes, in any order."""
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

    def rollout_blocking(self, batch: RolloutBatch) -> Iterator[GroupResult]:
        """The same from code without an event loop."""
        return _blocking(lambda: self.rollout(batch))

    async def cancel(self, batch_id: str) -> bool:
        """End a batch from elsewhere; its iterator yields what there is. False: no such batch."""
        return await self._handle.cancel.remote(batch_id)

    async def update_weights(self, version: int, source: str) -> WeightsLoaded:
        """Every replica loads the safetensors folder `source`; samples in flight go on under `version`.

        `version` must be above the present one. Raises WeightsRejected, with the reason, when it was not done.
        """
        answer = await self._handle.update_weights.remote(version, source)
        if isinstance(answer, Rejected):
            raise WeightsRejected(answer.reason)
        return answer

    async def status(self) -> ServiceStatus:
        return await self._handle.status.remote()

    async def pool_status(self) -> PoolView | None:
        """The KV pool as the coordinator knows it, at most a second old; None: the service has none."""
        return (await self.status()).pool

    async def record_rewards(self, group: GroupResult, rewards: Mapping[int, float] | Sequence[float]) -> None:
        """Tell the rewards of a group's samples, by sample index: drafts of later epochs follow the better answers.

        Best effort: they are kept where the service keeps history, and are not waited for.
        """
        known = dict(rewards) if isinstance(rewards, Mapping) else dict(enumerate(rewards))
        await self._handle.record_rewards.remote(group.prompt_key, group.step, known)

    async def forget_history(self) -> int:
        """Forget the answers of all earlier epochs, on disk too; the number there were."""
        return await self._handle.forget_history.remote()

    async def inspect_group(self, name: str) -> dict | None:
        """What the group context knows of a group id, prompt id or prompt key; None: nothing."""
        return await self._handle.inspect_group.remote(name)

    async def pool_detail(self) -> PoolView | None:
        """The same, with the keys of each weights version, which are counted for it."""
        return await self._handle.pool_detail.remote()

    async def drain_pool(self) -> int | None:
        """Forget everything that the pool holds; the number of keys removed. None: the service has no pool."""
        return await self._handle.drain_pool.remote()

    async def set_policies(self, policies: Policies) -> None:
        """Decide with other policies from the moment no batch is in flight."""
        await self._handle.set_policies.remote(policies)

    async def journal(self, on: bool) -> str | None:
        """Have what the core is told and answers written down, or no longer, from when no batch is in flight.

        Returns what is written so far under the present policies, as JSON lines; None: nothing.
        """
        return await self._handle.journal.remote(on)

    async def replica_changes(self) -> AsyncIterator[ReplicasChanged]:
        """How many engine replicas are up and wanted: now, then whenever that changes, until the iterator is dropped.

        What is given back is free for Ray once `replicas` has come down to `wanted`.
        """
        changes = self._stream.replica_changes.remote()
        try:
            async for change in changes:
                yield change
        finally:
            changes.cancel()  # else the coordinator follows for ever, and is given 20 s to end before it is killed

    async def reserve(self, replicas: int) -> None:
        """Want at least so many replicas until the next batch comes: engines that were given back take seconds to
        minutes to start, which the time before a step hides. The limits of the configuration hold."""
        await self._handle.reserve.remote(replicas)

    async def reset_caches(self) -> None:
        """Every replica forgets the KV of chunks that have ended. For benchmarks, between batches."""
        await self._handle.reset_caches.remote()

    async def take_trace(self, batch_id: str) -> list[dict]:
        """Every span of a batch that was rolled out here with `keep_trace`: the driver's and the service's."""
        trace_id = self._traces.pop(batch_id)
        return self._telemetry.take(trace_id) + await self._handle.take_spans.remote(trace_id)


def _blocking(stream) -> Iterator[GroupResult]:
    """Drive an async iterator on a loop of its own thread; closing the result closes it."""
    items: Queue = Queue()
    loop = asyncio.new_event_loop()
    done = object()

    async def pump():
        iterator = stream()
        try:
            async for item in iterator:
                items.put(item)
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: raised again in the caller's
            items.put(error)
        finally:
            await iterator.aclose()
            items.put(done)

    thread = threading.Thread(target=lambda: loop.run_until_complete(task), daemon=True, name="rollout")
    task = loop.create_task(pump())
    thread.start()
    try:
        while (item := items.get()) is not done:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
