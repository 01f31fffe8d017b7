"""The calls of `RolloutClient` that bring weights to the service from the caller's memory.

    await client.send_weights(7, model.named_parameters())
    staged = await client.stage_weights(7, tensors)     # or in two steps: from here on the tensors may change
    loaded = await client.commit_weights(staged)        # replicas switch, each between two of its steps

Invariant: a call that refuses or breaks off leaves the service under its former weights. Of `client.py`, which has
the handle and the roles.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tailrace.app.calls.blocking import blocking
from tailrace.deployments.messages.roles import NotAdmitted, Role
from tailrace.deployments.messages.rollout import Rejected, WeightsCheck, WeightsLoaded
from tailrace.deployments.staging.slots import Slots, memory_source, service_name
from tailrace.deployments.staging.stage import Stage, bytes_of, pairs_of

Tensors = Mapping[str, object] | Iterable[tuple[str, object]]


@dataclass(frozen=True)
class StagedWeights:
    """Weights in this node's shared memory that no replica has loaded. `seconds`: duration of the copy."""

    version: int
    tensors: int
    staged_bytes: int
    seconds: float
    stage: Stage

    def drop(self) -> None:
        """Frees their memory; nothing was committed."""
        self.stage.drop()


class WeightsCalls:
    """`_app_name`, `_handle`, `_role`, `_ask`, `status` and `update_weights` belong to the client."""

    async def stage_weights(self, version: int, tensors: Tensors) -> StagedWeights:
        """Copies tensors into this node's shared memory. They may change as soon as this returns.

        `tensors`: torch or numpy tensors, by the names of a saved Hugging Face folder (`tailrace.saved_weights` returns
        them); a mapping or (name, tensor) pairs. `version`: see `update_weights`. Raises ValueError, one line, if there
        is not enough memory or others are being staged. Staged weights are committed by `commit_weights`, or given up
        by `drop`.
        """
        status = await self.status()
        slots = Slots(self._slots_name())
        served = status.weights_version, status.weights_digest
        keeping = asyncio.create_task(self.own_slots())
        try:
            return await asyncio.to_thread(staged_in, slots, version, served, tensors)
        finally:
            await keeping

    stage_weights_blocking = blocking(stage_weights)

    async def own_slots(self) -> str:
        """Returns the name of the service's slots in this node's shared memory, and starts their keeper, which ends
        them with the service.
        """
        from tailrace.deployments.staging.keeper import keep_slots

        if not self._role.includes(Role.TRAINER):
            raise PermissionError(f"own_slots needs role trainer, and this client is {self._role.value}")
        await asyncio.to_thread(keep_slots, self._slots_name(), self._app_name)
        return self._slots_name()

    own_slots_blocking = blocking(own_slots)

    def _slots_name(self) -> str:
        import ray

        return service_name(self._app_name, ray.get_runtime_context().gcs_address)

    async def commit_weights(self, staged: StagedWeights) -> WeightsLoaded:
        """Has every replica check and load staged weights. Samples in flight continue under them.

        Replicas of other nodes, and those that start later there, pull them from the KV pool. Raises WeightsRejected,
        with the reason, if the update failed; the former weights then stay.
        """
        try:
            source = await asyncio.to_thread(staged.stage.seal)
        finally:
            staged.drop()  # of a sealed stage, nothing
        loaded = await self.update_weights(staged.version, str(source), source.digest)
        return loaded.model_copy(update={"staged_s": staged.seconds})

    commit_weights_blocking = blocking(commit_weights)

    async def send_weights(self, version: int, tensors: Tensors) -> WeightsLoaded:
        """Stages weights and commits them; see `stage_weights` and `commit_weights`."""
        return await self.commit_weights(await self.stage_weights(version, tensors))

    send_weights_blocking = blocking(send_weights)

    async def pause(self, mode: str = "keep") -> None:
        """Pauses the service: no chunk starts until `resume`. Weights may be updated meanwhile; an update needs no
        pause.

        `mode`, as vLLM's: samples in flight wait (`keep`), end before this returns (`wait`), or end with their tokens
        so far (`abort`). It holds for all drivers, and changes no token. A new coordinator is not paused.
        """
        await self._ask("pause", mode)

    pause_blocking = blocking(pause)

    async def resume(self) -> None:
        """Ends a pause, if there is one. Raises ValueError while the service sleeps."""
        await self._obeyed("resume")

    resume_blocking = blocking(resume)

    async def sleep(self, mode: str = "keep") -> None:
        """Pauses, and has every engine give back the memory of weights and KV, until `wake_up`.

        For trainers that share the device. Samples in flight continue after it with the same tokens (`mode`: see
        `pause`); `status().asleep` names the parts that sleep. Raises ValueError, one line, if the weights of an engine
        could not come back, for example because their folder has changed; the service then runs as before.
        """
        await self._obeyed("sleep", mode)

    sleep_blocking = blocking(sleep)

    async def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Wakes these parts of a sleeping service; it resumes with the last one.

        The weights are loaded again and checked against their digest. `update_weights` loads new ones instead. Raises
        ValueError, one line, if they do not come back; the service then stays asleep.
        """
        if unknown := set(tags) - {"weights", "kv_cache"}:
            raise ValueError(f"tags: {min(unknown)!r} is not a part that sleeps; give weights, kv_cache")
        await self._obeyed("wake_up", tuple(tags))

    wake_up_blocking = blocking(wake_up)

    async def check_weights(self) -> WeightsCheck:
        """Reads back the weights that every replica computes with, and compares them with their source.

        Takes seconds, in which replicas make no tokens. Raises ValueError, one line, if some could not be read.
        """
        return await self._obeyed("read_weights")

    check_weights_blocking = blocking(check_weights)

    async def _obeyed(self, method: str, *arguments):
        """Returns the answer of a call. Raises ValueError for a refusal."""
        answer = await self._ask(method, *arguments)
        if isinstance(answer, Rejected):
            raise ValueError(answer.reason)
        return answer

    async def cancel_all(self) -> int:
        """Ends every sample in flight, of all drivers, with its tokens so far. Returns their number."""
        return await self._ask("cancel_all")

    cancel_all_blocking = blocking(cancel_all)

    async def transfer_weights(self, phase: str, info: dict | list | None = None) -> str:
        """Runs one phase of an update as vLLM's trainer engines drive it: `init`, `start`, `part`, `finish`,
        `shutdown`.

        `info`: vLLM's. Engines need `vllm_args: {weight_transfer_config: {backend: nccl}}`, or `ipc`. Returns the
        source to give to `update_weights` after `finish`. Raises ValueError, one line; the present weights then stay.
        """
        answer = await self._handle.transfer_weights.remote(self._role, phase, info)
        if isinstance(answer, NotAdmitted):
            raise PermissionError(answer.reason)
        if isinstance(answer, Rejected):
            raise ValueError(answer.reason)
        return answer

    transfer_weights_blocking = blocking(transfer_weights)

    async def finish_transfer(self, version: int | None = None) -> WeightsLoaded:
        """Runs the phase `finish`, and commits under `version`, by default the next one. Raises ValueError, one
        line.
        """
        source = await self.transfer_weights("finish")
        staged = memory_source(source)
        return await self.update_weights(staged.version if version is None else version, source, staged.digest)

    finish_transfer_blocking = blocking(finish_transfer)

    async def rename_weights(self, version: str) -> WeightsLoaded:
        """Serves the present weights under a higher number; under the present number nothing changes. Raises
        ValueError.
        """
        status = await self.status()
        if not version.isdecimal():
            raise ValueError(f"weight version {version!r}: give a number, {status.weights_version} or above")
        if not status.weights_source:
            raise ValueError(f"weight version {version}: the weights are those of the start; update them first")
        return await self.update_weights(int(version), status.weights_source, status.weights_digest)

    rename_weights_blocking = blocking(rename_weights)


def staged_in(slots: Slots, version: int, served: tuple[int, str], tensors: Tensors) -> StagedWeights:
    """Copies tensors into a slot of this node. `served`: version and digest of the present weights."""
    began_s = time.monotonic()
    stage = Stage(slots, version, served, bytes_of(tensors))
    try:
        for name, tensor in pairs_of(tensors):
            stage.add(name, tensor)
    except BaseException:  # any error: it is raised again
        stage.drop()
        raise
    return StagedWeights(version, stage.tensors, stage.staged_bytes, time.monotonic() - began_s, stage)
