"""The coordinator's ends of the lines to its engine replicas: sends chunks, receives their ends and the reports.

Invariant: a chunk that was sent ends in a result, in ReplicaLost when its line is closed, or in ChunkError. Frames of a
closed line are dropped, so a report from before a loss never counts after it. Owned by `EngineClient`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tailrace.deployments.channel import frames
from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.channel.numbered import NumberedEnd
from tailrace.deployments.channel.sockets import CoordinatorSocket
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.errors import ChunkError, ChunkNotTaken, ReplicaLost, SampleRefused

MIN_REPORT_S = 0.5
"""Minimum seconds between a replica's reports: enough for a progress bar; an idle replica's loss shows in 3 s."""

REPORTS_PER_S = 256
"""Maximum reports per second of all replicas together, so that a fleet of any size costs the coordinator the same."""

PULSE_S = 1.0
"""Seconds between pulses to an engine, which also acknowledge its messages."""

SILENT_S = 3.0
"""Seconds without a report after which a replica has left, until its next report."""

STALE_S = 3.0
"""Maximum seconds that a report may travel; an older one is dropped, since a newer one follows."""

DRIFT = 1e-4
"""Maximum drift between two clocks, in seconds per second."""


class DatedReport(NamedTuple):
    """A replica's latest report, made at `observed_s` on our clock, plus the line's minimum delay."""

    report: EngineStats
    observed_s: float


@dataclass(slots=True)
class _Line:
    session: str
    replica_id: str
    end: NumberedEnd
    calls: dict[str, tuple[asyncio.Future, int]] = field(default_factory=dict)  # by chunk: its end, and Start number
    latest: DatedReport | None = None
    offset_s: float = float("inf")  # our clock minus the engine's, at the fastest report
    reported_s: float = 0.0
    pulsed_s: float = float("-inf")


class CoordinatorLines:
    """`listen`: opens the socket, given the function that takes its frames. `changed`: called when a report differs in
    more than numbers. `nonce`: unique among coordinators.
    """

    def __init__(
        self,
        listen: Callable[[Callable[[str, bytes], None]], CoordinatorSocket],
        changed: Callable[[], None],
        nonce: str,
    ):
        self._now, self._nonce, self._changed = asyncio.get_running_loop().time, nonce, changed
        self._lines: dict[str, _Line] = {}  # by replica
        self._sessions: dict[str, _Line] = {}
        self._opened = 0
        self.bad_frames: Counter[str] = Counter()  # by replica
        self._socket = listen(self._take)

    @property
    def address(self) -> Address:
        return self._socket.address

    @property
    def report_s(self) -> float:
        """Seconds between the reports of one replica."""
        return max(MIN_REPORT_S, len(self._lines) / REPORTS_PER_S)

    def open(self, replica_id: str) -> str:
        """Opens a new line to a replica. Returns its session, which the replica needs to dial."""
        self._opened += 1
        session = f"{replica_id}/{self._nonce}/{self._opened}"
        end = NumberedEnd(frames.encode, frames.decode, partial(self._socket.send, session))
        self._lines[replica_id] = self._sessions[session] = _Line(session, replica_id, end)
        return session

    def close(self, replica_id: str, reason: str) -> None:
        """Closes the line. Its chunks get ReplicaLost, or ChunkNotTaken if the replica had not received them."""
        if (line := self._lines.pop(replica_id, None)) is None:
            return
        del self._sessions[line.session]
        for answer, number in line.calls.values():
            if not answer.done():
                answer.set_exception((ReplicaLost if line.end.has_come(number) else ChunkNotTaken)(reason))

    def is_busy(self, replica_id: str) -> bool:
        """Returns whether chunks run over the line."""
        line = self._lines.get(replica_id)
        return line is not None and bool(line.calls)

    def reports(self) -> list[DatedReport]:
        """Returns the latest reports of replicas that have reported within SILENT_S, or three intervals if longer."""
        self._socket.read()  # frames that arrived while the loop was busy
        since_s = self._now() - max(SILENT_S, 3 * self.report_s)
        return [line.latest for line in self._lines.values() if line.latest is not None and line.reported_s >= since_s]

    async def run(self, replica_id: str, chunk: ChunkRequest) -> ChunkResult:
        """Runs a chunk. Raises ReplicaLost or ChunkError. Cancelling the call aborts the chunk."""
        line = self._lines.get(replica_id)
        if line is None or line.latest is None:
            raise ChunkNotTaken(f"there is no line to replica {replica_id!r}")
        answer = asyncio.get_running_loop().create_future()
        line.calls[chunk.chunk_id] = answer, line.end.send(frames.Start(chunk), self._now())
        try:
            return await answer
        except asyncio.CancelledError:
            self.abort(replica_id, chunk.chunk_id, keep_kv=False)
            raise
        finally:
            line.calls.pop(chunk.chunk_id, None)

    def abort(self, replica_id: str, chunk_id: str, keep_kv: bool) -> None:
        """Ends a chunk early; its own call ends then. Without a line this does nothing."""
        if (line := self._lines.get(replica_id)) is not None:
            line.end.send(frames.Abort(chunk_id, keep_kv), self._now())

    def pulse(self) -> None:
        """Sends pulses, and unacknowledged messages again. Called a few times a second."""
        now_s, pulse = self._now(), frames.Pulse(self.report_s)
        for line in self._lines.values():
            line.end.resend(now_s)
            if now_s >= line.pulsed_s + PULSE_S:
                line.pulsed_s = now_s
                line.end.send_once(pulse)

    def _take(self, session: str, frame: bytes) -> None:
        if (line := self._sessions.get(session)) is None:
            return
        try:
            if (message := line.end.take(frame, self._now())) is not None:
                self._obey(line, message)
        except frames.BadFrame as error:
            self.bad_frames[line.replica_id] += 1
            _settle(line, error.chunk_id, ChunkError(f"chunk {error.chunk_id}: {error}"))
        except ValueError:
            self.bad_frames[line.replica_id] += 1

    def _obey(self, line: _Line, message: frames.Message) -> None:
        match message:
            case frames.ChunkEnded(chunk_id, result):
                _settle(line, chunk_id, result)
            case frames.ChunkFailure(chunk_id, cause, text):
                _settle(line, chunk_id, ERRORS[cause](text))
            case frames.Report(sent_s, stats):
                self._take_report(line, sent_s, stats)

    def _take_report(self, line: _Line, sent_s: float, stats: EngineStats) -> None:
        now_s = self._now()
        line.offset_s = min(line.offset_s + DRIFT * (now_s - line.reported_s), now_s - sent_s)
        line.reported_s = now_s
        observed_s = sent_s + line.offset_s
        if now_s > observed_s + STALE_S or stats.replica_id != line.replica_id:
            return
        before, line.latest = line.latest, DatedReport(stats, observed_s)
        if before is None or _state(before.report) != _state(stats):
            self._changed()


ERRORS = {frames.Cause.DOWN: ReplicaLost, frames.Cause.REFUSED: SampleRefused, frames.Cause.CHUNK: ChunkError}


def _settle(line: _Line, chunk_id: str, result: ChunkResult | Exception) -> None:
    """Sets the result of a chunk; a chunk without a caller is dropped."""
    answer, _ = line.calls.get(chunk_id, (None, 0))
    if answer is None or answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)


def _state(report: EngineStats) -> tuple:
    """Returns the fields whose change others wait for."""
    return report.weights_version, report.weights_digest, report.asleep, report.methods, report.adapters
