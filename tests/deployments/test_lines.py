"""Both ends of a line over real encrypted sockets: chunks, their ends, reports, and ends of the line itself."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import zmq
from test_line_frames import CHUNK, RESULT, STATS

from tailrace.deployments.channel import coordinator_lines, engine_line, numbered
from tailrace.deployments.channel import sockets as channel_sockets
from tailrace.deployments.channel.coordinator_lines import CoordinatorLines
from tailrace.deployments.channel.encrypted import Address, dial, listen
from tailrace.deployments.channel.engine_line import EngineLine
from tailrace.deployments.channel.sockets import DialledSocket, ListeningSocket
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.errors import (
    AdapterRefused,
    ChunkError,
    ChunkNotTaken,
    EngineDown,
    ReplicaLost,
    SampleRefused,
)

HOST = "127.0.0.1"
SHORT_S = 1.0
"""In place of the 3 s after which one who is silent is given up, or a message is sent again."""


class OneChunkEngine:
    """Gives `result` for any chunk, or raises it; waits for ever if it is None."""

    def __init__(self, result: object = RESULT):
        self.result, self.chunks, self.aborted, self.left = result, [], [], 0

    async def generate_chunk(self, chunk: ChunkRequest) -> ChunkResult:
        self.chunks.append(chunk)
        try:
            if self.result is None:
                await asyncio.Event().wait()
        finally:
            self.left += self.result is None
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    async def abort(self, chunk_id: str, keep_kv: bool) -> None:
        self.aborted.append((chunk_id, keep_kv))

    async def stats(self) -> EngineStats:
        return STATS


class Setting:
    """A coordinator's lines, with one to the replica `r1`."""

    def __init__(self, engine: OneChunkEngine):
        self.changes, self.engine = asyncio.Event(), engine
        self.lines = CoordinatorLines(partial(ListeningSocket, HOST), self.changes.set, "nonce")
        session = self.lines.open("r1")
        self.line = EngineLine(session, engine, partial(DialledSocket, self.lines.address, session))
        self.holding = asyncio.ensure_future(self.line.hold())
        self.pulsing = asyncio.ensure_future(self._pulse())

    async def ready(self) -> None:
        async with asyncio.timeout(60):
            await self.changes.wait()

    async def _pulse(self) -> None:
        while True:
            self.lines.pulse()
            await asyncio.sleep(0.25)

    def end(self) -> None:
        self.holding.cancel()
        self.pulsing.cancel()
        self.line.close()
        self.lines._socket.close()


def run(story: Callable[[Setting], Awaitable[None]], engine: OneChunkEngine | None = None) -> None:
    async def whole() -> None:
        setting = Setting(engine or OneChunkEngine())
        try:
            async with asyncio.timeout(120):
                await setting.ready()
                await story(setting)
        finally:
            setting.end()

    asyncio.run(whole())


def test_a_chunk_goes_out_and_its_end_comes_back():
    async def story(setting):
        result = await setting.lines.run("r1", CHUNK)
        assert np.array_equal(result.token_ids, RESULT.token_ids) and result.end is RESULT.end
        (chunk,) = setting.engine.chunks
        assert np.array_equal(chunk.token_ids, CHUNK.token_ids) and chunk.sampling == CHUNK.sampling
        assert not setting.lines.is_busy("r1")

    run(story)


def test_a_result_that_no_line_carries_ends_its_chunk_with_the_reason():
    async def story(setting):
        with pytest.raises(ChunkError, match="object is not carried by a socket"):
            await setting.lines.run("r1", CHUNK)
        setting.engine.result = RESULT
        assert (await setting.lines.run("r1", CHUNK)).end is RESULT.end, "the line goes on"

    run(story, OneChunkEngine(replace(RESULT, drafts=object())))


def test_reports_come_by_themselves_and_a_silent_replica_is_not_heard(monkeypatch):
    async def story(setting):
        monkeypatch.setattr(coordinator_lines, "SILENT_S", 60.0)
        (latest,) = setting.lines.reports()
        assert latest.report.replica_id == "r1" and latest.report.running == STATS.running
        setting.holding.cancel()
        monkeypatch.setattr(coordinator_lines, "SILENT_S", SHORT_S)
        while setting.lines.reports():
            await asyncio.sleep(0.1)

    run(story)


@pytest.mark.parametrize(
    ("raised", "given"),
    [
        (EngineDown("a step failed"), ReplicaLost),
        (AdapterRefused("no such folder"), SampleRefused),
        (ValueError("already running here"), ChunkError),
        (asyncio.CancelledError(), ChunkError),
        (KeyError("a defect"), ChunkError),
    ],
)
def test_each_failure_comes_as_its_kind(raised, given):
    async def story(setting):
        with pytest.raises(given) as caught:
            await setting.lines.run("r1", CHUNK)
        assert type(caught.value) is given and "\n" not in str(caught.value)

    run(story, OneChunkEngine(raised))


def test_an_end_that_cannot_be_read_fails_its_chunk_alone():
    async def story(setting):
        with pytest.raises(ChunkError, match=CHUNK.chunk_id):
            await setting.lines.run("r1", CHUNK)
        assert setting.lines.bad_frames == {"r1": 1}
        setting.engine.result = RESULT
        assert (await setting.lines.run("r1", CHUNK)).chunk_id == CHUNK.chunk_id

    run(story, OneChunkEngine("not a result"))


def test_a_cancelled_call_aborts_its_chunk_and_an_abort_is_passed_on():
    async def story(setting):
        call = asyncio.ensure_future(setting.lines.run("r1", CHUNK))
        while not setting.engine.chunks:
            await asyncio.sleep(0.01)
        call.cancel()
        setting.lines.abort("r1", "another", keep_kv=True)
        while len(setting.engine.aborted) < 2:
            await asyncio.sleep(0.01)
        assert set(setting.engine.aborted) == {(CHUNK.chunk_id, False), ("another", True)}

    run(story, OneChunkEngine(None))


def test_a_closed_line_loses_its_chunks_and_a_missing_one_takes_none():
    async def story(setting):
        call = asyncio.ensure_future(setting.lines.run("r1", CHUNK))
        while not setting.engine.chunks or setting.lines._lines["r1"].end._unacknowledged:
            await asyncio.sleep(0.01)
        setting.lines.close("r1", "it has died")
        with pytest.raises(ReplicaLost, match="it has died") as caught:
            await call
        assert type(caught.value) is ReplicaLost, "it had taken the chunk"
        with pytest.raises(ChunkNotTaken):
            await setting.lines.run("r1", CHUNK)

    run(story, OneChunkEngine(None))


def test_an_engine_that_ends_its_line_aborts_the_chunks_of_it():
    async def story(setting):
        call = asyncio.ensure_future(setting.lines.run("r1", CHUNK))
        while not setting.engine.chunks:
            await asyncio.sleep(0.01)
        setting.line.close()
        await asyncio.wait_for(setting.holding, 60)
        await asyncio.sleep(0)
        assert setting.engine.left == 1
        call.cancel()

    run(story, OneChunkEngine(None))


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_an_idle_engine_leaves_a_silent_coordinator_soon_and_a_busy_one_waits(busy, monkeypatch):
    monkeypatch.setattr(engine_line, "IDLE_SILENT_S", SHORT_S / 2)

    async def story(setting):
        call = asyncio.ensure_future(setting.lines.run("r1", CHUNK)) if busy else None
        while busy and not setting.engine.chunks:
            await asyncio.sleep(0.01)
        while not setting.line.was_pulsed:
            await asyncio.sleep(0.01)
        setting.pulsing.cancel()
        done, _ = await asyncio.wait({setting.holding}, timeout=2 * SHORT_S if busy else 20)
        assert bool(done) is not busy
        if call is not None:
            call.cancel()

    run(story, OneChunkEngine(None))


def test_a_stranger_without_the_key_and_one_with_nonsense_change_nothing():
    async def story(setting):
        endpoint, key = setting.lines.address
        context = zmq.Context.instance()
        for address in (Address(endpoint, zmq.curve_keypair()[0]), Address(endpoint, key)):
            socket = context.socket(zmq.DEALER)
            dial(socket, address)
            socket.send_multipart([b"nonsense"])
            socket.send_multipart([b"two", b"frames"])
            await asyncio.sleep(0.2)
            socket.close(linger=0)
        plain = context.socket(zmq.DEALER)
        plain.connect(endpoint)
        plain.send(b"plain")
        await asyncio.sleep(0.2)
        plain.close(linger=0)
        assert (await setting.lines.run("r1", CHUNK)).chunk_id == CHUNK.chunk_id

    run(story)


def test_a_line_heals_after_its_connection_has_broken(monkeypatch):
    monkeypatch.setattr(numbered, "RESEND_S", SHORT_S)

    async def story(setting):
        socket, frames = setting.line._socket, []
        send = socket._send
        socket._send = frames.extend  # nothing arrives
        call = asyncio.ensure_future(setting.lines.run("r1", CHUNK))
        while not any(b"ChunkEnded" in frame for frame in frames):
            await asyncio.sleep(0.01)
        socket._send = send
        assert (await asyncio.wait_for(call, 60)).chunk_id == CHUNK.chunk_id
        assert len(setting.engine.chunks) == 1, "the chunk ran once"

    run(story)


def test_a_closed_socket_takes_nothing_more_and_its_port_is_free_again():
    async def story():
        came = []
        listener = ListeningSocket(HOST, lambda session, frame: came.append(frame))
        engine = DialledSocket(listener.address, "session", came.append)
        engine.send(b"frame")
        async with asyncio.timeout(60):
            while not came:
                await asyncio.sleep(0.01)
        for end in (engine, engine, listener, listener):
            end.close()
        engine.send(b"dropped")
        port = int(listener.address.endpoint.rpartition(":")[2])
        async with asyncio.timeout(60):
            while not bound(port):
                await asyncio.sleep(0.01)
        assert came == [b"frame"]

    asyncio.run(story())


@pytest.mark.parametrize(("host", "endpoint"), [(HOST, f"tcp://{HOST}:"), ("::1", "tcp://[::1]:")])
def test_lines_run_over_both_families_of_addresses(host, endpoint):
    async def story():
        came = []
        listener = ListeningSocket(host, lambda session, frame: came.append((session, frame)))
        assert listener.address.endpoint.startswith(endpoint)
        engine = DialledSocket(listener.address, "session", came.append)
        engine.send(b"frame")
        async with asyncio.timeout(60):
            while not came:
                await asyncio.sleep(0.01)
        for end in (engine, listener):
            end.close()
        assert came == [("session", b"frame")]

    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    asyncio.run(story())


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_an_engine_that_connects_again_takes_its_session_over():
    async def story():
        came, first, second = [], [], []
        listener = ListeningSocket(HOST, lambda session, frame: came.append(frame))
        former = DialledSocket(listener.address, "session", first.append)
        former.send(b"former")
        async with asyncio.timeout(60):
            while came != [b"former"]:
                await asyncio.sleep(0.01)
            present = DialledSocket(listener.address, "session", second.append)
            present.send(b"present")
            while not second:
                listener.send("session", b"to the engine")
                await asyncio.sleep(0.01)
        assert came[-1] == b"present"
        for end in (former, present, listener):
            end.close()

    asyncio.run(story())


def test_a_frame_that_came_while_another_was_sent_is_taken():
    """ZeroMQ signals a new frame once, and a call of the socket takes the signal away."""

    async def story():
        came = []
        listener = ListeningSocket(HOST, lambda session, frame: came.append(frame))
        engine = DialledSocket(listener.address, "session", lambda frame: None)
        engine.send(b"first")
        async with asyncio.timeout(60):
            while not came:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        engine.send(b"second")
        time.sleep(0.1)  # it comes, while the loop is busy
        listener.send("session", b"other")
        async with asyncio.timeout(30):
            while len(came) < 2:
                await asyncio.sleep(0.01)
        for end in (engine, listener):
            end.close()

    asyncio.run(story())


def bound(port: int) -> bool:
    """Whether a port could be listened to, for a moment."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


def test_a_peer_that_announces_a_huge_frame_is_cut_off_and_the_others_are_not(monkeypatch):
    monkeypatch.setattr(channel_sockets, "MAX_FRAME_BYTES", 1000)

    async def story():
        came = []
        listener = ListeningSocket(HOST, lambda session, frame: came.append((session, len(frame))))
        ends = [DialledSocket(listener.address, session, came.append) for session in ("huge", "small")]
        ends[0].send(bytes(1001))  # encryption adds some
        ends[1].send(bytes(900))
        async with asyncio.timeout(60):
            while ("small", 900) not in came:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        for end in (*ends, listener):
            end.close()
        assert came == [("small", 900)]

    asyncio.run(story())


@pytest.mark.parametrize("opened", [lambda socket: listen(socket, HOST), lambda socket: dial(socket, strangers())])
def test_a_socket_with_frames_that_none_reads_holds_up_no_process_that_ends(opened):
    with zmq.Context.instance().socket(zmq.ROUTER) as one:
        opened(one)
        assert one.linger == 0


def strangers() -> Address:
    return Address(f"tcp://{HOST}:9", zmq.curve_keypair()[0])
