"""When the ends of a line send, give up and forget, and when they do not: in virtual time, over ways of memory."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from test_line_frames import CHUNK, RESULT, STATS

from tailrace.deployments.channel.coordinator_lines import PULSE_S, SILENT_S, STALE_S, CoordinatorLines
from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.channel.engine_line import IDLE_SILENT_S, REPORT_S, EngineLine
from tailrace.deployments.channel.frames import Abort, ChunkEnded, Message, Pulse, Report, Start, decode, encode
from tailrace.deployments.channel.numbered import RESEND_S, NumberedEnd
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.errors import ChunkNotTaken, ReplicaLost
from tailrace.lab.fuzz.virtual_time import VirtualLoop


class End(NumberedEnd):
    """The other end of a line, by hand."""

    def __init__(self, encode: Callable = encode):
        self.frames: list[bytes] = []
        super().__init__(encode, decode, self.frames.append)

    def frame(self, message: Message, numbered: bool = False) -> bytes:
        if numbered:
            self.send(message, 0.0)
        else:
            self.send_once(message)
        return self.frames.pop()


class Listener:
    """A coordinator's socket. `waiting`: frames that come once the socket is read."""

    address = Address("memory", b"")

    def __init__(self, take: Callable[[str, bytes], None]):
        self.take, self.sent, self.waiting = take, [], []

    def send(self, session: str, frame: bytes) -> None:
        self.sent.append((session, frame))

    def read(self) -> None:
        while self.waiting:
            self.take(*self.waiting.pop(0))

    def close(self) -> None:
        """Nothing is open here."""


class Coordinator:
    """A coordinator's lines, and the engines' ends of them by hand."""

    def __init__(self):
        self.changes = 0
        self.lines = CoordinatorLines(self._listen, self._changed, "nonce")
        self.sessions: dict[str, str] = {}
        self.ends: dict[str, End] = {}

    def _listen(self, take) -> Listener:
        self.socket = Listener(take)
        return self.socket

    def _changed(self) -> None:
        self.changes += 1

    def open(self, name: str = "r1") -> None:
        self.sessions[name], self.ends[name] = self.lines.open(name), End()

    def frame(self, message: Message, name: str = "r1") -> tuple[str, bytes]:
        """Of an engine: a chunk's end is numbered, a report is not."""
        return self.sessions[name], self.ends[name].frame(message, isinstance(message, ChunkEnded))

    def come(self, message: Message, name: str = "r1") -> None:
        self.socket.take(*self.frame(message, name))

    def report(self, name: str = "r1", sent_s: float | None = None, **changes) -> None:
        sent_s = asyncio.get_running_loop().time() if sent_s is None else sent_s
        self.come(Report(sent_s, replace(STATS, **{"replica_id": name} | changes)), name)

    def taken(self, name: str = "r1") -> list[Message]:
        """The messages that an engine takes of all that was sent to it since the last look."""
        mine = [frame for session, frame in self.socket.sent if session == self.sessions[name]]
        self.socket.sent = [sent for sent in self.socket.sent if sent[0] != self.sessions[name]]
        messages = [self.ends[name].take(frame, 0.0) for frame in mine]
        return [message for message in messages if message is not None]


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def from_100_on() -> None:
        await asyncio.sleep(100.0)
        await story()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(from_100_on())
        assert not loop.errors
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def test_a_replica_is_heard_until_it_has_been_silent_too_long_and_no_longer():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        assert coordinator.lines.reports() == [], "it has not reported yet"
        coordinator.report()
        await asyncio.sleep(SILENT_S)
        assert len(coordinator.lines.reports()) == 1
        await asyncio.sleep(0.125)
        assert coordinator.lines.reports() == []
        coordinator.report()
        assert len(coordinator.lines.reports()) == 1, "its next report brings it back"

    play(story)


def test_in_a_large_fleet_a_replica_is_heard_for_three_of_its_rare_reports():
    async def story():
        coordinator = Coordinator()
        for number in range(512):
            coordinator.open(f"r{number}")
        assert coordinator.lines.report_s == 2.0
        coordinator.report("r7")
        await asyncio.sleep(6.0)
        assert [one.report.replica_id for one in coordinator.lines.reports()] == ["r7"]
        await asyncio.sleep(0.125)
        assert coordinator.lines.reports() == []

    play(story)


def test_reports_that_came_while_the_loop_was_busy_count_at_once():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        report = Report(asyncio.get_running_loop().time(), replace(STATS, replica_id="r1"))
        coordinator.socket.waiting.append(coordinator.frame(report))
        assert len(coordinator.lines.reports()) == 1

    play(story)


def test_a_report_has_the_time_of_the_fastest_way_and_clocks_may_part_slowly():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        coordinator.report(sent_s=0.0)  # at 100 s of the coordinator's clock
        await asyncio.sleep(10.0)
        coordinator.report(sent_s=9.0)  # a second late
        (latest,) = coordinator.lines.reports()
        assert latest.observed_s == pytest.approx(109.001, abs=1e-6)
        await asyncio.sleep(10.0)
        coordinator.report(sent_s=20.5)  # faster than any before
        (latest,) = coordinator.lines.reports()
        assert latest.observed_s == pytest.approx(120.0, abs=1e-6)

    play(story)


def test_a_report_that_travelled_too_long_or_is_of_another_replica_changes_nothing():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        coordinator.report(sent_s=100.0, weights_version=4)
        await asyncio.sleep(10.0)
        coordinator.report(sent_s=109.5 - STALE_S, weights_version=5)
        coordinator.report(sent_s=110.0, weights_version=6, replica_id="r2")
        assert [one.report.weights_version for one in coordinator.lines.reports()] == [4]
        coordinator.report(sent_s=110.5 - STALE_S, weights_version=7)
        assert [one.report.weights_version for one in coordinator.lines.reports()] == [7], "it is late, not stale"

    play(story)


def test_others_hear_of_a_change_once_and_of_numbers_never():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        for version, running in ((4, {}), (4, {"c": 3}), (5, {}), (5, {"c": 9})):
            coordinator.report(weights_version=version, running=running)
        assert coordinator.changes == 2, "the first report, and the new version"

    play(story)


def test_a_closed_line_s_frames_change_nothing():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        coordinator.report()
        late = coordinator.frame(Report(100.0, replace(STATS, replica_id="r1", weights_version=9)))
        coordinator.lines.close("r1", "it has died")
        coordinator.socket.take(*late)
        coordinator.socket.take("r1/nobody's/7", late[1])
        assert coordinator.changes == 1 and coordinator.lines.reports() == []
        assert not coordinator.lines.bad_frames
        coordinator.lines.close("r1", "again")  # does nothing

    play(story)


def test_a_new_line_to_a_replica_has_another_session_and_the_former_one_s_frames_are_dropped():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        coordinator.report()
        late = coordinator.frame(Report(100.0, replace(STATS, replica_id="r1", weights_version=9)))
        coordinator.lines.close("r1", "it has died")
        coordinator.open()
        coordinator.socket.take(*late)
        assert coordinator.sessions["r1"] != late[0] and coordinator.lines.reports() == []
        coordinator.report()
        assert len(coordinator.lines.reports()) == 1

    play(story)


def test_a_closed_line_loses_the_chunks_that_were_heard_of_and_gives_the_others_back():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        coordinator.open("r2")
        coordinator.report()
        coordinator.report("r2")
        first = asyncio.ensure_future(coordinator.lines.run("r1", replace(CHUNK, chunk_id="a")))
        other = asyncio.ensure_future(coordinator.lines.run("r2", replace(CHUNK, chunk_id="a")))
        await asyncio.sleep(0)
        assert [message.chunk.chunk_id for message in coordinator.taken()] == ["a"]
        coordinator.report()  # acknowledges it
        second = asyncio.ensure_future(coordinator.lines.run("r1", replace(CHUNK, chunk_id="b")))
        await asyncio.sleep(0)
        coordinator.lines.close("r1", "it has died")
        ends = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(end) for end in ends] == [ReplicaLost, ChunkNotTaken]
        assert not coordinator.lines.is_busy("r1") and coordinator.lines.is_busy("r2"), "the other line's runs on"
        coordinator.taken("r2")
        coordinator.come(ChunkEnded("a", replace(RESULT, chunk_id="a")), "r2")
        assert (await other).chunk_id == "a"

    play(story)


def test_the_end_of_a_chunk_without_a_caller_is_dropped():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        coordinator.report()
        call = asyncio.ensure_future(coordinator.lines.run("r1", CHUNK))
        await asyncio.sleep(0)
        coordinator.taken()
        for chunk_id in ("another", CHUNK.chunk_id, CHUNK.chunk_id):
            coordinator.come(ChunkEnded(chunk_id, RESULT))
        assert (await call).chunk_id == CHUNK.chunk_id and not coordinator.lines.is_busy("r1")
        coordinator.come(ChunkEnded(CHUNK.chunk_id, RESULT))
        assert not coordinator.lines.bad_frames

    play(story)


def test_frames_that_cannot_be_read_are_counted_by_replica():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        coordinator.open("r2")
        coordinator.socket.take(coordinator.sessions["r1"], b"short")
        coordinator.socket.take(coordinator.sessions["r1"], End(bytes).frame(b"\x63no kind"))
        coordinator.socket.take(coordinator.sessions["r2"], End(bytes).frame(b""))
        assert coordinator.lines.bad_frames == {"r1": 2, "r2": 1}

    play(story)


def test_a_coordinator_pulses_once_a_second_however_often_it_is_called():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        times = []
        for step in range(17):
            coordinator.lines.pulse()
            times += [step / 4] * coordinator.taken().count(Pulse(0.5))
            await asyncio.sleep(0.25)
        assert times == [0.0, PULSE_S, 2 * PULSE_S, 3 * PULSE_S, 4 * PULSE_S]

    play(story)


def test_what_an_engine_has_not_heard_is_sent_again_and_nothing_else():
    async def story():
        coordinator = Coordinator()
        coordinator.open()
        coordinator.report()
        call = asyncio.ensure_future(coordinator.lines.run("r1", CHUNK))
        await asyncio.sleep(0)
        coordinator.lines.abort("r1", "other", keep_kv=True)
        coordinator.socket.sent.clear()  # both are lost
        came = []
        for step in range(16):
            coordinator.lines.pulse()
            came += [(step / 4, type(message)) for message in coordinator.taken() if not isinstance(message, Pulse)]
            coordinator.report()
            await asyncio.sleep(0.25)
        assert came == [(RESEND_S, Start), (RESEND_S, Abort)], "later ones were acknowledged"
        call.cancel()
        await asyncio.sleep(0)

    play(story)


class Engine:
    """Counts what a line asks of it. Its chunk runs until it is cancelled."""

    def __init__(self):
        self.reports, self.aborted, self.is_down = 0, [], False

    async def generate_chunk(self, chunk):
        await asyncio.Event().wait()

    async def abort(self, chunk_id: str, keep_kv: bool) -> None:
        self.aborted.append((chunk_id, keep_kv))

    async def stats(self) -> EngineStats:
        self.reports += 1
        if self.reports > 10_000:
            pytest.fail("it reports without a pause")
        await asyncio.sleep(0)
        if self.is_down:
            raise ValueError("it is down")
        return STATS


class Dialled:
    """An engine's socket: a coordinator's end by hand."""

    def __init__(self, take: Callable[[bytes], None]):
        self.take, self.end, self.sent, self.closes = take, End(), [], 0

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)

    def close(self) -> None:
        self.closes += 1

    def come(self, message: Message) -> None:
        self.take(self.end.frame(message, numbered=not isinstance(message, Pulse)))


class Held:
    """An engine's line that is held."""

    def __init__(self):
        self.engine = Engine()
        self.line = EngineLine("session", self.engine, self._dial)
        self.holding = asyncio.ensure_future(self.line.hold())

    def _dial(self, take) -> Dialled:
        self.socket = Dialled(take)
        return self.socket


def now() -> float:
    return asyncio.get_running_loop().time()


async def seconds_of(waited: Awaitable) -> float:
    began_s = now()
    await waited
    return now() - began_s


@pytest.mark.parametrize(("report_s", "idle_s"), [(0.5, IDLE_SILENT_S), (2.0, 6.0)])
def test_an_idle_engine_leaves_after_its_time_and_not_before(report_s, idle_s):
    async def story():
        held = Held()
        held.socket.come(Pulse(report_s))
        assert idle_s < await seconds_of(held.holding) <= idle_s + 2 * report_s
        assert held.line.closed and held.socket.closes == 1

    play(story)


def test_an_engine_that_was_never_pulsed_or_whose_chunk_runs_waits_for_a_silent_coordinator():
    async def story():
        new, busy = Held(), Held()
        busy.socket.come(Pulse(0.5))
        busy.socket.come(Start(CHUNK))
        await asyncio.sleep(10 * IDLE_SILENT_S)
        assert not new.line.closed and not busy.line.closed
        await asyncio.sleep(120.0)
        assert new.line.closed and busy.line.closed

    play(story)


def test_an_engine_reports_at_its_interval_and_once_more_when_something_has_changed():
    async def story():
        held = Held()
        await asyncio.sleep(10 * REPORT_S + 0.1)
        assert held.engine.reports == 11
        held.line.report()
        await asyncio.sleep(0.1)
        assert held.engine.reports == 12
        await asyncio.sleep(10 * REPORT_S)
        assert held.engine.reports == 22
        held.engine.is_down, before = True, len(held.socket.sent)
        await asyncio.sleep(2 * REPORT_S)
        assert held.engine.reports == 24 and len(held.socket.sent) == before, "one that is down says nothing"
        held.line.close()

    play(story)


def test_a_closed_line_ends_at_once_with_its_chunks_and_takes_nothing_more():
    async def story():
        held = Held()
        held.socket.come(Start(CHUNK))
        await asyncio.sleep(0.1)
        held.line.close()
        assert await seconds_of(held.holding) == 0.0
        held.line.close()
        held.socket.come(Abort("c", True))
        await asyncio.sleep(1.0)
        assert held.socket.closes == 1 and held.engine.aborted == []
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    play(story)


def test_a_line_stays_while_its_coordinator_gives_signs_of_life():
    async def story():
        held = Held()
        for _ in range(20):
            held.socket.come(Pulse(0.5))
            await asyncio.sleep(IDLE_SILENT_S - 0.5)
        assert not held.line.closed and held.line.session == "session"
        held.line.close()

    play(story)


def test_an_abort_that_waits_is_not_collected_as_garbage():
    async def story():
        held = Held()

        async def abort(chunk_id, keep_kv):
            await asyncio.get_running_loop().create_future()  # which nothing else knows

        held.engine.abort = abort
        await asyncio.sleep(0.1)
        before = len(asyncio.all_tasks())
        held.socket.come(Abort("c", True))
        await asyncio.sleep(0.1)
        gc.collect()
        assert len(asyncio.all_tasks()) == before + 1
        held.line.close()

    play(story)


def test_a_line_that_another_call_holds_stays_open():
    async def story():
        held = Held()
        await asyncio.sleep(0.1)
        second = asyncio.ensure_future(held.line.hold())
        await held.holding
        assert not held.line.closed
        second.cancel()
        await asyncio.wait({second})
        assert held.line.closed

    play(story)


def test_frames_of_strangers_are_no_signs_of_life():
    async def story():
        held = Held()
        held.socket.come(Pulse(0.5))
        began_s = now()
        while not held.holding.done():
            held.socket.take(b"short")
            await asyncio.sleep(0.25)
        assert now() - began_s < 2 * IDLE_SILENT_S

    play(story)
