"""Calls from the coordinator to the engine replicas: chunks go over a line to each replica, all else over Serve.

A line lives as long as one Serve call, which ends with the replica. Invariant: a call to a replica ends in a result, in
`ReplicaLost` (the replica is gone; its chunks must run again) or in `ChunkError` (the replica lives, this chunk failed;
`SampleRefused`: it would fail on any replica). Called by the coordinator.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle

from tailrace.deployments.channel.coordinator_lines import CoordinatorLines, DatedReport
from tailrace.deployments.channel.frames import carries
from tailrace.deployments.channel.sockets import CoordinatorSocket
from tailrace.deployments.engine.shared_features import SharedFeatures
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult
from tailrace.deployments.messages.command import CheckWeights, Command, LoadAdapter, Peek, ResetCache, TakeSpans
from tailrace.deployments.messages.errors import (
    ChunkError,
    ChunkNotTaken,
    EngineDown,
    ReplicaLost,
    RequestRefused,
    SampleRefused,
    is_own_cancel,
    one_line,
)
from tailrace.deployments.router import ReplicaGone, poll_all, running_replicas

POLL_TIMEOUT_S = 10.0
"""Timeout, in seconds, of calls that a replica answers at once. One that takes longer hangs, and Serve's health check
replaces it.
"""

PEEK_S = 1.0
"""Maximum seconds to wait for the tokens of a running chunk."""

CHECK_S = 600.0
"""Maximum seconds of a check of new weights: every value of a large checkpoint is read from a network folder."""

FOLLOW_S = 0.25
"""Seconds between reads of the set of running replicas. A replica that stops waits for the end of its line."""

KNOWN_S = 10.0
"""Seconds between calls to all replicas while none is known: this process learns of replicas from its first call."""

SETTLE_S = 10.0
"""Maximum seconds that a new coordinator waits for a report of every running replica; one that hangs is replaced by
Serve.
"""


class EngineClient:
    """Thin wrapper of the engine deployment's handle. `listen`: opens the socket for lines, see `CoordinatorLines`.
    `put`: puts an object into Ray's object store. `running`: returns the names of the running replicas.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        listen: Callable[[Callable[[str, bytes], None]], CoordinatorSocket],
        nonce: str,
        put: Callable = ray.put,
        running: Callable[[DeploymentHandle], Iterable[str]] = running_replicas,
    ):
        self._handle, self._all_running = handle, running
        self._changed = asyncio.Event()
        self._lines = CoordinatorLines(listen, self._changed.set, nonce)
        self._holds: dict[str, asyncio.Task] = {}  # Serve calls that hold lines, by replica
        self._now = asyncio.get_running_loop().time
        self._began_s, self._asked, self._settled = self._now(), False, False
        self.features = SharedFeatures(put)

    @property
    def changed(self) -> asyncio.Event:
        """Event that is set when a replica reports a change of state, for example that it has loaded weights."""
        return self._changed

    @property
    def report_s(self) -> float:
        """Seconds between the reports of one replica."""
        return self._lines.report_s

    def reports(self) -> list[DatedReport]:
        """Returns the latest report of each replica that has reported lately, see `CoordinatorLines.reports`."""
        return self._lines.reports()

    def _running(self) -> dict[str, None]:
        """Running replicas, in an order that does not depend on hashes, so that a simulated run can be repeated."""
        return dict.fromkeys(sorted(self._all_running(self._handle)))

    @property
    def settled(self) -> bool:
        """Returns whether every replica that ran when this coordinator began has reported, or has been silent for
        SETTLE_S.
        """
        if not self._settled:
            reported = {one.report.replica_id for one in self.reports()}
            all_report = self._asked and reported.issuperset(self._running())
            self._settled = all_report or self._now() > self._began_s + SETTLE_S
        return self._settled

    async def follow(self) -> None:
        """Holds a line to each running replica. Never returns."""
        asked_s = float("-inf")
        while True:
            running = self._running()
            if not running and self._now() > asked_s + KNOWN_S:
                asked_s = self._now()
                with contextlib.suppress(Exception):  # there is no replica yet, or Ray fails
                    await poll_all(self._handle, "stats", KNOWN_S)
                running = self._running()
            self._asked = True
            for replica_id in [name for name in running if name not in self._holds]:
                self._holds[replica_id] = asyncio.ensure_future(self._hold(replica_id))
            for replica_id in [held for held in self._holds if held not in running]:
                if not self._lines.is_busy(replica_id):  # a replica that stops waits for its calls to end
                    self._holds[replica_id].cancel()
            self._lines.pulse()
            await asyncio.sleep(FOLLOW_S)

    async def _hold(self, replica_id: str) -> None:
        """Holds a line for as long as the replica lives. Any other error of the call leaves the line open."""
        session, reason, again = self._lines.open(replica_id), "its line has ended", False
        try:
            while True:
                try:
                    await self._call(replica_id, "hold_line", self._lines.address, session, again)
                    break
                except ReplicaLost as error:
                    reason = str(error)
                    break
                except (Exception, asyncio.CancelledError) as error:  # an error of Ray on the way
                    if isinstance(error, asyncio.CancelledError) and is_own_cancel():
                        raise
                    again = True
                    await asyncio.sleep(FOLLOW_S)
        finally:
            self._lines.close(replica_id, reason)
            del self._holds[replica_id]

    async def generate(self, replica_id: str, chunk: ChunkRequest) -> ChunkResult:
        if carries(chunk):
            return await self._lines.run(replica_id, chunk)
        return await self._call(replica_id, "generate_chunk", self.features.referred(chunk))

    async def abort(self, replica_id: str, chunk_id: str, keep_kv: bool) -> None:
        self._lines.abort(replica_id, chunk_id, keep_kv)

    async def ask(self, replica_id: str, command: Command) -> Any:
        """A replica's answer to a command. Raises ChunkError when it refuses, ReplicaLost when it is gone."""
        return await self._call(replica_id, "obey", command)

    async def ask_all(self, command: Command, timeout_s: float = POLL_TIMEOUT_S) -> list[Any]:
        """Answers of all replicas that answer, in no order: results, or the exceptions that they ended with. Raises
        TimeoutError if not all have answered in time."""
        return await poll_all(self._handle, "obey", timeout_s, command)

    async def peek(self, replica_id: str, chunk_id: str) -> np.ndarray | None:
        """Returns the tokens of a running chunk so far, or None if its replica does not send them within PEEK_S."""
        with contextlib.suppress(Exception):  # the replica may be lost, or in a long step: it is only for people
            return await asyncio.wait_for(self.ask(replica_id, Peek(chunk_id)), PEEK_S)
        return None

    async def spans(self, trace_id: str) -> list[dict]:
        """Returns the spans of a trace from every replica that answers; none if not all have answered in time."""
        answers: list[Any] = []
        with contextlib.suppress(TimeoutError):
            answers = await self.ask_all(TakeSpans(trace_id))
        return [span for answer in answers if isinstance(answer, list) for span in answer]

    async def reset_caches(self) -> bool:
        """Has every replica drop the KV of chunks that have ended, so that a benchmark's runs do not help each other.

        Returns False if one keeps it, because chunks run there.
        """
        return all(answer is True for answer in await self.ask_all(ResetCache()))

    async def digests(self, command: CheckWeights | LoadAdapter) -> set[str]:
        """The digests that the replicas answer with; of a replica that is lost there is none.

        Raises ChunkError, one line, if one refuses, and TimeoutError if one has not answered in CHECK_S.
        """
        answers = await self.ask_all(command, CHECK_S)
        for answer in answers:
            if isinstance(answer, RayTaskError) and not isinstance(answer, EngineDown):
                raise ChunkError(str(answer.cause or one_line(answer)))
        return {answer for answer in answers if isinstance(answer, str)}

    async def _call(self, replica_id: str, method: str, *arguments):
        try:
            return await self._handle.options(session_id=replica_id, method_name=method).remote(*arguments)
        except ReplicaGone as error:
            raise ChunkNotTaken(one_line(error)) from error
        except (RayActorError, EngineDown) as error:
            raise ReplicaLost(one_line(error)) from error
        except RayTaskError as error:
            refused = isinstance(error.cause, RequestRefused)
            kind = SampleRefused if refused else ChunkError
            raise kind(one_line(error.cause or error)) from error
