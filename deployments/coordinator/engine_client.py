"""Calls from the coordinator to the engine replicas: to one by its id, or to all with a deadline.

Invariant: a call to a replica ends in a result, in `ReplicaLost` (it is gone; its chunks must run again) or in
`ChunkError` (the replica lives, this chunk failed; `SampleRefused`: it would fail on any replica); every poll has a
deadline. Called by the coordinator.
"""

import asyncio
import contextlib
from collections.abc import Callable

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle

from tailrace.deployments.engine.shared_features import SharedFeatures
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats, WeightsRead
from tailrace.deployments.messages.errors import (
    AdapterRefused,
    ChunkError,
    ChunkNotTaken,
    EngineDown,
    FeaturesRefused,
    ReplicaLost,
    SampleRefused,
    one_line,
)
from tailrace.deployments.messages.transfer import Transfer
from tailrace.deployments.router import ReplicaGone, poll_all

POLL_TIMEOUT_S = 10.0
"""A replica answers from a snapshot; one that takes longer hangs, and Serve's health check will replace it."""

CHECK_S = 600.0
"""Longest check of new weights: every value is read, of large checkpoints from a network folder."""


class EngineClient:
    """Thin over the handle of the engine deployment. `put`: into Ray's object store."""

    def __init__(self, handle: DeploymentHandle, put: Callable = ray.put):
        self._handle = handle
        self._known: list[str] = []
        self.features = SharedFeatures(put)

    async def stats(self) -> list[EngineStats]:
        """A report of every replica that answers within POLL_TIMEOUT_S.

        A broadcast finds new replicas, but one that hangs keeps all its answers back: then each is asked by itself.
        """
        try:
            answers = await poll_all(self._handle, "stats", POLL_TIMEOUT_S)
        except Exception:  # noqa: BLE001 - a replica hangs, or Ray is in trouble: the others are still to be heard
            answers = await asyncio.gather(*map(self._stats_of, self._known), return_exceptions=True)
        reports = [answer for answer in answers if isinstance(answer, EngineStats)]
        self._known = [report.replica_id for report in reports]
        return reports

    async def _stats_of(self, replica_id: str) -> EngineStats:
        call = self._handle.options(session_id=replica_id, method_name="stats").remote()
        return await asyncio.wait_for(call, POLL_TIMEOUT_S)

    async def generate(self, replica_id: str, chunk: ChunkRequest) -> ChunkResult:
        return await self._call(replica_id, "generate_chunk", self.features.referred(chunk))

    async def abort(self, replica_id: str, chunk_id: str, keep_kv: bool) -> None:
        await self._call(replica_id, "abort", chunk_id, keep_kv)

    async def load_weights(self, replica_id: str, version: int, source: str, digest: str) -> None:
        """Returns when the replica holds them; ChunkError when it cannot."""
        await self._call(replica_id, "load_weights", version, source, digest)

    async def fall_asleep(self, replica_id: str) -> None:
        """Returns once the replica has given its memory back; ChunkError when it cannot."""
        await self._call(replica_id, "fall_asleep")

    async def wake_kv(self, replica_id: str) -> None:
        await self._call(replica_id, "wake_kv")

    async def read_weights(self, replica_id: str) -> WeightsRead:
        """The weights that the replica computes with, read back; ChunkError when it cannot."""
        return await self._call(replica_id, "read_weights")

    async def transfer_weights(self, replica_id: str, transfer: Transfer) -> str:
        """Returns the source of weights that were staged, else an empty text; ChunkError when the phase failed."""
        return await self._call(replica_id, "transfer_weights", transfer)

    async def check_weights(self, source: str) -> set[str]:
        """The digests of folder `source` on all replicas that answer; of a replica that is lost there is none.

        Raises ChunkError, one line, if a replica cannot load them, and TimeoutError if one has not looked in CHECK_S.
        """
        return await self._digests("check_weights", source)

    async def load_adapter(self, path: str) -> set[str]:
        """The digests of the adapter in a folder, which all replicas that answer have loaded. Raises the same."""
        return await self._digests("load_adapter", path)

    async def name_adapter(self, adapter: Adapter) -> None:
        """Every replica that answers reports the content of a name from now on."""
        with contextlib.suppress(TimeoutError):
            await poll_all(self._handle, "name_adapter", POLL_TIMEOUT_S, adapter)

    async def forget_adapter(self, name: str) -> None:
        with contextlib.suppress(TimeoutError):
            await poll_all(self._handle, "forget_adapter", POLL_TIMEOUT_S, name)

    async def _digests(self, method: str, source: str) -> set[str]:
        answers = await poll_all(self._handle, method, CHECK_S, source)
        for answer in answers:
            if isinstance(answer, RayTaskError) and not isinstance(answer, EngineDown):
                raise ChunkError(str(answer.cause or one_line(answer)))
        return {answer for answer in answers if isinstance(answer, str)}

    async def take_spans(self, trace_id: str) -> list[dict]:
        """Spans of a trace from every replica that answers."""
        try:
            answers = await poll_all(self._handle, "take_spans", POLL_TIMEOUT_S, trace_id)
        except TimeoutError:
            return []
        return [span for answer in answers if isinstance(answer, list) for span in answer]

    async def reset_caches(self) -> bool:
        """Every replica forgets the KV of chunks that have ended. Returns False if one does not, since chunks run."""
        return all(answer is True for answer in await poll_all(self._handle, "reset_cache", POLL_TIMEOUT_S))

    async def _call(self, replica_id: str, method: str, *arguments):
        try:
            return await self._handle.options(session_id=replica_id, method_name=method).remote(*arguments)
        except ReplicaGone as error:
            raise ChunkNotTaken(one_line(error)) from error
        except (RayActorError, EngineDown) as error:
            raise ReplicaLost(one_line(error)) from error
        except RayTaskError as error:
            refused = isinstance(error.cause, AdapterRefused | FeaturesRefused)
            kind = SampleRefused if refused else ChunkError
            raise kind(one_line(error.cause or error)) from error
