"""`RolloutClient`: an RL driver's handle to the service. Thin over the coordinator's DeploymentHandle.

    async for group in client.rollout(batch): ...        or        for group in client.rollout_blocking(batch): ...
    answer = await client.open(seed=7).generate(text=...)        single samples, see `app.calls.session`
    await client.send_weights(7, model.named_parameters())       or stage_weights, then commit_weights

Groups come as they finish. Closing the iterator cancels the batch, and so does a driver that is gone for a minute.
Every call has a blocking twin, `NAME_blocking`. Raises RolloutRejected if the service refuses the batch, Ray's errors
if the service itself stays lost, and PermissionError if the client's role has no right to the call.

Invariant: an update of the weights that is refused or breaks off leaves the service under its former weights.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from tailrace.app.calls.batch_streams import BatchStreams
from tailrace.app.calls.blocking import blocking, blocking_iterator
from tailrace.app.calls.connection import Connection
from tailrace.app.calls.driver_spans import DriverSpans
from tailrace.app.calls.otlp import otlp_wanted
from tailrace.app.calls.own_adapters import CoordinatorAdapters, OwnAdapters
from tailrace.app.calls.own_loads import OwnLoads
from tailrace.app.calls.own_weights import OwnWeights, served_version
from tailrace.app.calls.publish_calls import PublishCalls
from tailrace.app.calls.refused import accepted
from tailrace.app.calls.resume import Heartbeat
from tailrace.app.calls.session import RolloutSession, new_session
from tailrace.app.calls.single_samples import SingleSamples
from tailrace.app.calls.staged_weights import StagedWeights, Staging, Tensors
from tailrace.app.calls.trajectory_calls import TrajectoryCalls
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, WeightsCheck, WeightsLoaded
from tailrace.deployments.messages.scores import Score
from tailrace.deployments.messages.status import (
    BatchLog,
    PoolView,
    ReplicasChanged,
    SampleDetail,
    SampleLog,
    ServiceSnapshot,
)
from tailrace.deployments.staging.slots import memory_source
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.families.registry import Policies

SLEEPING_PARTS = ("weights", "kv_cache")
"""Parts of an engine's memory that a sleeping service gives back."""


class RolloutClient:
    """`app_name`: the Serve application on the cluster that `ray.init` has connected this process to.

    `resume_s`: seconds for which a call waits for a lost coordinator; then it raises Ray's error. `role`: a trainer may
    do everything; an evaluator may roll out and read the status; an observer may read the status alone. `handle`: the
    application's handle, if available; then its name does not count. `connect`: makes the connection of a handle.
    `samples`: single samples by their messages, which sessions and the gateway request. `trajectories`: those that
    gateways capture. `publishing`: weights from ranks.
    """

    def __init__(
        self,
        app_name: str = "tailrace",
        telemetry: Telemetry | None = None,
        resume_s: float = 600.0,
        handle=None,
        heartbeat: type[Heartbeat] = Heartbeat,
        role: Role | str = Role.TRAINER,
        connect: type[Connection] = Connection,
    ):
        if handle is None:
            from ray import serve

            handle = serve.get_app_handle(app_name)
        self.app_name, self._heartbeat = app_name, heartbeat
        self._connection = connection = connect(handle, Role(role), resume_s)
        self._staging = Staging(connection.role, app_name)
        self._weights = OwnWeights(partial(connection.ask, "update_weights"), partial(served_version, connection.ask))
        self._adapters = OwnAdapters(CoordinatorAdapters(connection))
        loads = OwnLoads(self._weights, self._adapters)
        self._batches = BatchStreams(connection, loads, heartbeat)
        self.samples, self.trajectories = SingleSamples(connection, loads), TrajectoryCalls(connection)
        self.publishing = PublishCalls(connection, self._weights, self._staging)
        self._spans = DriverSpans(telemetry or Telemetry("tailrace-driver", otlp_wanted()))
        self._journaling: Heartbeat | None = None

    # ---- batches and samples -----------------------------------------------------------------------------

    async def rollout(self, batch: RolloutBatch) -> AsyncIterator[GroupResult]:
        """Rolls out a batch. Yields each group as it finishes, in any order.

        Continues after the coordinator was lost: missing groups are made again, with the same tokens. A batch is never
        rolled out under a lower weights version than this client's last update.
        """
        with self._spans.span(batch) as sent:
            async with aclosing(self._batches.groups(sent)) as groups:
                async for group in groups:
                    yield group

    rollout_blocking = blocking_iterator(rollout)

    async def cancel(self, batch_id: str) -> bool:
        """Ends a batch: its iterator yields the tokens made so far. Returns False if no such batch is in flight."""
        self._batches.cancelled.add(batch_id)
        return await self._connection.ask("cancel", batch_id)

    cancel_blocking = blocking(cancel)

    async def cancel_all(self) -> int:
        """Ends every sample in flight, of all drivers, with its tokens so far. Returns their number."""
        return await self._connection.ask("cancel_all")

    cancel_all_blocking = blocking(cancel_all)

    def open(self, batch_id: str | None = None, **settings) -> RolloutSession:
        """Opens a session: single samples, requested at any time; see `tailrace.app.calls.session`.

        `batch_id`: by default a new name. `settings`: those of a RolloutBatch without groups, such as `seed`, `step`,
        `priority`, `share`. Raises ValueError for others.
        """
        return new_session(self.samples, batch_id, settings, self._heartbeat)

    async def record_rewards(self, group: GroupResult, rewards: Mapping[int, float] | Sequence[float]) -> None:
        """Records the rewards of a group's samples, by sample index. Drafts of later epochs follow the better answers.

        Best effort: rewards are kept if the service keeps history; the call does not wait for the write.
        """
        known = dict(rewards) if isinstance(rewards, Mapping) else dict(enumerate(rewards))
        await self._connection.ask("record_rewards", group.prompt_key, group.step, known)

    record_rewards_blocking = blocking(record_rewards)

    async def take_trace(self, batch_id: str) -> list[dict]:
        """Returns the driver's and the service's spans of a batch that this client rolled out with `keep_trace`."""
        trace_id, spans = self._spans.take(batch_id)
        return spans + await self._connection.ask("take_spans", trace_id)

    take_trace_blocking = blocking(take_trace)

    # ---- weights -----------------------------------------------------------------------------------------

    async def update_weights(self, version: int, source: str, digest: str = "", score: Score = ()) -> WeightsLoaded:
        """Loads the safetensors folder `source` on every replica. Samples in flight continue under `version`.
        `send_weights` does the same without a folder.

        `version` must not be below the current one. The current one with the same content changes nothing, so a call
        may be repeated. `digest`: of the intended content, from an earlier `WeightsLoaded`; empty for any. `score`:
        the trainer's, by `tailrace.weights_score`; replicas unlike it are set aside. Raises WeightsRejected, one line.
        """
        return await self._weights.update(version, source, digest, score)

    update_weights_blocking = blocking(update_weights)

    async def stage_weights(self, version: int, tensors: Tensors) -> StagedWeights:
        """Copies tensors into this node's shared memory. They may change as soon as this returns.

        `tensors`: torch or numpy tensors, by the names of a saved Hugging Face folder (`tailrace.saved_weights` returns
        them); a mapping or (name, tensor) pairs. `version`: see `update_weights`. Raises ValueError, one line, if there
        is not enough memory or others are being staged. `commit_weights` commits staged weights, `drop` gives them up.
        """
        status = await self.status()
        return await self._staging.stage(version, (status.weights_version, status.weights_digest), tensors)

    stage_weights_blocking = blocking(stage_weights)

    async def own_slots(self) -> str:
        """Returns the name of the service's slots on this node, and starts the keeper that ends them with it."""
        return await self._staging.own_slots()

    own_slots_blocking = blocking(own_slots)

    async def commit_weights(self, staged: StagedWeights, score: Score = ()) -> WeightsLoaded:
        """Has every replica check and load staged weights. `score`: see `update_weights`.

        Replicas of other nodes, and those that start later there, pull them from the KV pool. Raises WeightsRejected,
        with the reason, if the update failed; the former weights then stay.
        """
        try:
            source = await asyncio.to_thread(staged.stage.seal)
            loaded = await self.update_weights(staged.version, str(source), source.digest, score)
        finally:
            staged.drop()  # keeps a sealed slot, which the next stage may take from here on
        return loaded.model_copy(update={"staged_s": staged.seconds})

    commit_weights_blocking = blocking(commit_weights)

    async def send_weights(self, version: int, tensors: Tensors, score: Score = ()) -> WeightsLoaded:
        """Stages weights and commits them; see `stage_weights` and `commit_weights`."""
        return await self.commit_weights(await self.stage_weights(version, tensors), score)

    send_weights_blocking = blocking(send_weights)

    async def transfer_weights(self, phase: str, info: dict | list | None = None) -> str:
        """Runs one phase of an update as vLLM's trainer engines drive it: `init`, `start`, `part`, `finish`,
        `shutdown`.

        `info`: vLLM's. Engines need `vllm_args: {weight_transfer_config: {backend: nccl}}`, or `ipc`. Returns the
        source to give to `update_weights` after `finish`. Raises ValueError, one line; the present weights then stay.
        """
        return accepted(await self._connection.send("transfer_weights", phase, info), "transfer_weights")

    transfer_weights_blocking = blocking(transfer_weights)

    async def finish_transfer(self, version: int | None = None) -> WeightsLoaded:
        """Runs the phase `finish`; commits under `version`, by default the next one. Raises ValueError, one line."""
        source = await self.transfer_weights("finish")
        staged = memory_source(source)
        return await self.update_weights(staged.version if version is None else version, source, staged.digest)

    finish_transfer_blocking = blocking(finish_transfer)

    async def rename_weights(self, version: str) -> WeightsLoaded:
        """Serves the present weights under a higher number; their own changes nothing. Raises ValueError."""
        return await self._weights.rename(version, await self.status())

    rename_weights_blocking = blocking(rename_weights)

    async def check_weights(self) -> WeightsCheck:
        """Reads back the weights that every replica computes with, and compares them with their source.

        Takes seconds, in which replicas make no tokens. Raises ValueError, one line, if some could not be read.
        """
        return await self._connection.ask("read_weights")

    check_weights_blocking = blocking(check_weights)

    # ---- adapters ----------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Loads the adapter in the absolute folder `path` on every replica, under a name.

        The folder has PEFT's adapter_config.json and adapter_model.safetensors. The same content again changes nothing,
        so a call may be repeated. Another content is the next version of the name, for samples that arrive later;
        samples in flight end with their own, so keep its folder until then. Returns its version and digest. Raises
        AdapterRejected, with the reason; the name then keeps its content.
        """
        return await self._adapters.load(name, path)

    load_adapter_blocking = blocking(load_adapter)

    async def unload_adapter(self, name: str) -> None:
        """Removes an adapter's name. Samples in flight end with it. Raises AdapterRejected if it is not loaded."""
        await self._adapters.unload(name)

    unload_adapter_blocking = blocking(unload_adapter)

    async def adapters(self) -> tuple[Adapter, ...]:
        """Returns the adapters that requests may name."""
        return await self._adapters.served()

    adapters_blocking = blocking(adapters)

    # ---- pause and sleep ---------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        """Pauses the service: no chunk starts until `resume`. Weights may be updated meanwhile; an update needs no
        pause.

        `mode`, as vLLM's: samples in flight wait (`keep`), end before this returns (`wait`), or end with their tokens
        so far (`abort`). It holds for all drivers, and changes no token. A new coordinator is not paused.
        """
        await self._connection.ask("pause", mode)

    pause_blocking = blocking(pause)

    async def resume(self) -> None:
        """Ends a pause, if there is one. Raises ValueError while the service sleeps."""
        await self._connection.ask("resume")

    resume_blocking = blocking(resume)

    async def sleep(self, mode: str = "keep") -> None:
        """Pauses, and has every engine give back the memory of weights and KV, until `wake_up`.

        For trainers that share the device. Samples in flight continue after it with the same tokens (`mode`: see
        `pause`); `status().asleep` names the parts that sleep. Raises ValueError, one line, if the weights of an engine
        could not come back, for example because their folder has changed; the service then runs as before.
        """
        await self._connection.ask("sleep", mode)

    sleep_blocking = blocking(sleep)

    async def wake_up(self, tags: Sequence[str] = SLEEPING_PARTS) -> None:
        """Wakes these parts of a sleeping service; it resumes with the last one.

        The weights are loaded again and checked against their digest. `update_weights` loads new ones instead. Raises
        ValueError, one line, if they do not come back; the service then stays asleep.
        """
        if unknown := set(tags).difference(SLEEPING_PARTS):
            raise ValueError(f"tags: {min(unknown)!r} is not a part that sleeps; give {', '.join(SLEEPING_PARTS)}")
        await self._connection.ask("wake_up", tuple(tags))

    wake_up_blocking = blocking(wake_up)

    # ---- replicas and policies ---------------------------------------------------------------------------

    async def replica_changes(self) -> AsyncIterator[ReplicasChanged]:
        """Yields the number of engine replicas that are up and wanted: now, then at each change, until it is closed.

        Resources of replicas given back are free for Ray once `replicas` equals `wanted`.
        """
        async with self._connection.stream("replica_changes") as changes:
            async for change in changes:
                yield accepted(change, "replica_changes")

    replica_changes_blocking = blocking_iterator(replica_changes)

    async def reserve(self, replicas: int) -> None:
        """Requests at least `replicas` replicas until the next batch arrives.

        Engines that were given back take seconds to minutes to start; a call before the step hides that time. The
        limits of the configuration hold.
        """
        await self._connection.ask("reserve", replicas)

    reserve_blocking = blocking(reserve)

    async def reset_caches(self) -> bool:
        """Drops the KV of ended chunks on every replica. Returns False if one keeps it, because chunks run there.

        For benchmarks, between batches.
        """
        return await self._connection.ask("reset_caches")

    reset_caches_blocking = blocking(reset_caches)

    async def set_policies(self, policies: Policies) -> None:
        """Switches to other policies as soon as no batch is in flight.

        They are sent by name and knobs. Raises PoliciesRejected if the service cannot make them, or may not: a policy
        of your own must be of a package in the deployment's `allowed_code`.
        """
        await self._connection.ask("set_policies", policies.model_dump(mode="json"))

    set_policies_blocking = blocking(set_policies)

    async def journal(self, on: bool) -> str | None:
        """Turns the journal of the core's events and actions on or off, as soon as no batch is in flight.

        Returns the journal so far under the current policies, as JSON lines, or None if there is none. Journaling ends
        a minute after this process.
        """
        if self._journaling is not None:
            self._journaling.stop()
        answer = await self._connection.ask("journal", on)
        if on:
            self._journaling = self._heartbeat(partial(self._connection.send, "renew_journal"))
        return answer

    journal_blocking = blocking(journal)

    # ---- history and KV pool -----------------------------------------------------------------------------

    async def forget_history(self) -> int:
        """Deletes the answers of all earlier epochs, on disk too. Returns their number."""
        return await self._connection.ask("forget_history")

    forget_history_blocking = blocking(forget_history)

    async def inspect_group(self, name: str) -> dict | None:
        """Returns the group context's entry for a group id, prompt id or prompt key, or None if it has none."""
        return await self._connection.ask("inspect_group", name)

    inspect_group_blocking = blocking(inspect_group)

    async def pool_detail(self) -> PoolView | None:
        """Returns the pool's status with the number of keys per weights version, counted for this call."""
        return await self._connection.ask("pool_detail")

    pool_detail_blocking = blocking(pool_detail)

    async def drain_pool(self) -> int | None:
        """Empties the pool. Returns the number of removed keys, or None if the service has no pool."""
        return await self._connection.ask("drain_pool")

    drain_pool_blocking = blocking(drain_pool)

    # ---- status ------------------------------------------------------------------------------------------

    async def status(self, longest: int = 0) -> ServiceSnapshot:
        """Returns the service at one moment: replicas, batches, pool and counters, as of the last replica reports.

        `longest`: number of the longest unended samples in it.
        """
        return await self._connection.ask("status", longest)

    status_blocking = blocking(status)

    async def watch(self) -> AsyncIterator[dict]:
        """Follows the service: its whole state as rows by section and name, then each time the rows that have changed.

        Items have `whole`, `number`, `at_s` (unix seconds) and `sections`; a removed row is None. A slow reader gets
        the whole state again. Ends by an error of Ray's once the coordinator is lost; call again.
        """
        epoch, number = "", 0
        while True:
            async with self._connection.stream("watch", epoch, number) as items:
                async for item in items:
                    delta = json.loads(accepted(item, "watch"))
                    epoch, number = delta["epoch"], delta["number"]
                    yield delta

    watch_blocking = blocking_iterator(watch)

    async def sample_detail(self, sample_id: str) -> SampleDetail | None:
        """Returns chunks and text so far of an unended sample, by its id in `status`; None if it has ended."""
        return await self._connection.ask("sample_detail", sample_id)

    sample_detail_blocking = blocking(sample_detail)

    async def sample_log(self, name: str) -> SampleLog | None:
        """Returns chunks, moves, reasons and faults of a sample, by its core id or BATCH/PROMPT#INDEX, or None."""
        return await self._connection.ask("sample_log", name)

    sample_log_blocking = blocking(sample_log)

    async def batch_log(self, name: str) -> BatchLog | None:
        """Returns progress, ends, faults and samples of a batch, or None if the service does not know it any more."""
        return await self._connection.ask("batch_log", name)

    batch_log_blocking = blocking(batch_log)
