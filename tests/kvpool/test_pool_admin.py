"""Of the pool's admin client: who waits for it can be stopped at every instant; what is read of a page of metrics."""

import asyncio
import json
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from tailrace.kvpool import admin as module
from tailrace.kvpool.admin import KEYS_A_CALL, PoolAdmin, read_metrics
from tailrace.kvpool.status import PoolDown


def test_a_cancellation_as_the_answer_comes_is_not_lost():
    """In the loop's turn in which the answer has come and nobody has been woken yet. Lost, the watch over the master
    would go on, and whoever stops it would wait for ever."""

    async def cancelled_then() -> None:
        admin, answered = PoolAdmin("127.0.0.1", "127.0.0.1:1", "127.0.0.1:2", "tcp", ""), threading.Event()
        waiting = asyncio.create_task(admin._in_time(answered.wait, 30.0))
        await asyncio.sleep(0.01)
        answered.set()
        while admin._threads._work_queue.qsize() or not answered.is_set():
            time.sleep(0.001)
        time.sleep(0.05)  # the thread hands its answer over; this loop does not turn meanwhile
        asyncio.get_running_loop().call_soon(waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        admin.close()

    asyncio.run(cancelled_then())


PAGE = """\
# HELP master_key_count Total number of keys
# TYPE master_key_count gauge
master_key_count 12
# HELP master_evicted_key_count Evicted
# TYPE master_evicted_key_count counter
master_evicted_key_count 3
# TYPE master_put_start_failures_total counter
master_put_start_failures_total 5
# TYPE master_value_size_bytes histogram
master_value_size_bytes_bucket{le="4096"} 7
master_value_size_bytes_sum 9
# TYPE segment_allocated_bytes gauge
segment_allocated_bytes{segment="10.0.0.1:17"} 4096
segment_allocated_bytes{segment="10.0.0.2:17"} 0
this is no line of metrics
"""


def test_the_wanted_counts_of_a_page_are_read_and_nothing_else_of_it():
    names = ("master_key_count", "master_evicted_key_count_total", "master_put_start_failures_total")
    counts, segments = read_metrics(PAGE, names)
    assert counts == dict(zip(names, (12.0, 3.0, 5.0), strict=True))
    assert segments == {"10.0.0.1:17": 4096, "10.0.0.2:17": 0}


class Client:
    """Mooncake's. `codes`: of a call, in turn. `places`: the ends of each key's copies in memory."""

    def __init__(self):
        self.codes, self.places, self.calls, self.setups, self.setup_code = [], {}, [], [], 0

    def setup(self, *given) -> int:
        self.setups.append(given)
        return self.setup_code

    def _answer(self, *call):
        self.calls.append(call)
        return self.codes.pop(0)

    def batch_remove(self, keys, force):
        return self._answer("remove", keys, force)

    def remove_by_regex(self, regex, force):
        return self._answer("regex", regex, force)

    def create_move_task(self, key, source, target):
        return "task", self._answer("move", key, source, target)

    def batch_get_replica_desc(self, keys):
        self.calls.append(("desc", len(keys)))
        return {key: [copy_at(end) for end in self.places[key]] for key in keys}


def copy_at(end: str | None):
    """A copy in memory at this end, or one on an SSD."""
    buffer = SimpleNamespace(transport_endpoint=end, size=64)
    memory = SimpleNamespace(buffer_descriptor=buffer)
    return SimpleNamespace(is_memory_replica=lambda: end is not None, get_memory_descriptor=lambda: memory)


SEGMENTS = {"segments": [{"segment_name": f"{one}:1", "te_endpoint": f"{one}:9"} for one in ("a", "b")]}


def play(story, client: Client | None = None, pages: dict | None = None) -> Client:
    """Runs `story(admin)` with a connected client. `pages`: by path, beside that of the segments."""
    client = client or Client()
    pages = {"/get_segments_detail": json.dumps(SEGMENTS)} | (pages or {})

    async def whole() -> None:
        admin = PoolAdmin("10.0.0.1", "10.0.0.1:50051", "10.0.0.1:80", "rdma", "mlx5_0")

        async def page(path: str) -> str:
            return pages[path]

        admin._client, admin._page = client, page
        try:
            await story(admin)
        finally:
            admin.close()

    asyncio.run(whole())
    return client


def test_keys_that_are_in_use_are_given_back_and_those_that_are_gone_are_counted():
    async def story(admin):
        assert await admin.release([]) == (0, [])
        assert await admin.release(["a", "b", "c", "d", "e", "f"]) == (2, ["b", "c", "d"])

    client = Client()
    client.codes = [[0, -703, -706, -714, -704, 0]]
    play(story, client)
    assert client.calls == [("remove", ["a", "b", "c", "d", "e", "f"], False)]


@pytest.mark.parametrize(("code", "count"), [(3, 3), (0, 0), (-1, 0)])
def test_keys_are_retired_by_their_form_unless_they_are_in_use(code, count):
    async def story(admin):
        assert await admin.retire("^x") == count

    client = Client()
    client.codes = [code]
    assert play(story, client).calls == [("regex", "^x", False)]


def test_a_call_that_finds_an_old_connection_closed_is_made_once_more():
    async def story(admin):
        assert await admin.retire("^x") == 2
        with pytest.raises(PoolDown, match="the pool's master does not answer"):
            await admin.retire("^x")

    client = Client()
    client.codes = [-900, 2, -900, -900]
    assert len(play(story, client).calls) == 4


def test_keys_move_from_where_they_are_unless_they_lie_there_or_on_an_ssd_alone():
    async def story(admin):
        assert await admin.move([], "b:1") == []
        assert await admin.move(list(client.places), "b:1") == ["1"], "the master refuses the other"

    client = Client()
    client.places = {"1": ["a:9"], "2": ["b:9"], "3": [None], "4": ["a:9", "b:9"], "5": ["c:9"], "6": [None, "a:9"]}
    client.codes = [0, -5]
    play(story, client)
    assert [call[1:] for call in client.calls if call[0] == "move"] == [("1", "a:1", "b:1"), ("6", "a:1", "b:1")]


def test_many_keys_move_in_several_calls():
    async def story(admin):
        assert await admin.move(list(client.places), "b:1") == list(client.places)

    client = Client()
    client.places = {str(number): ["a:9"] for number in range(KEYS_A_CALL + 1)}
    client.codes = [0] * len(client.places)
    play(story, client)
    assert [call for call in client.calls if call[0] == "desc"] == [("desc", KEYS_A_CALL), ("desc", 1)]


def test_keys_of_a_segment_are_those_without_another_copy_in_memory():
    async def story(admin):
        assert await admin.keys_at("a:1") == {"1": 64, "5": 64}
        assert await admin.keys_at("c:1") == {}
        assert await admin.segments() == {"a:1": "a:9", "b:1": "b:9"}

    client = Client()
    client.places = {"1": ["a:9"], "2": ["b:9"], "3": [None], "4": ["a:9", "b:9"], "5": [None, "a:9"]}
    play(story, client, {"/get_all_keys": "1\n2\n3\n4\n5\n"})


def test_many_keys_are_looked_at_in_parts():
    async def story(admin):
        assert len(await admin.keys_at("a:1")) == 2 * KEYS_A_CALL + 1

    client = Client()
    client.places = {str(number): ["a:9"] for number in range(2 * KEYS_A_CALL + 1)}
    play(story, client, {"/get_all_keys": "\n".join(client.places)})
    assert client.calls == [("desc", KEYS_A_CALL), ("desc", KEYS_A_CALL), ("desc", 1)]


def test_a_client_connects_on_a_thread_and_again_until_it_has(monkeypatch):
    client, mooncake = Client(), ModuleType("mooncake.store")
    mooncake.MooncakeDistributedStore = lambda: client
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", mooncake)

    async def story() -> None:
        admin = PoolAdmin("10.0.0.1", "10.0.0.1:50051", "10.0.0.1:80", "rdma", "mlx5_0")
        with pytest.raises(PoolDown, match="not connected yet"):
            await admin.retire("^x")
        client.setup_code = -5
        for setups in (1, 2):
            await admin.connect()
            await admin._connecting
            assert len(client.setups) == setups
        client.setup_code = 0
        await admin.connect()
        await admin.connect()
        await admin._connecting
        client.codes = [4]
        assert await admin.retire("^x") == 4
        await admin.connect()
        assert client.setups == [("10.0.0.1", "P2PHANDSHAKE", 0, 0, "rdma", "mlx5_0", "10.0.0.1:50051")] * 3
        admin.close()

    asyncio.run(story())


def test_a_master_that_does_not_answer_in_time_or_at_all_is_down(monkeypatch):
    monkeypatch.setattr(module, "CALL_S", 0.02)

    async def story(admin):
        over = threading.Event()
        admin._client = SimpleNamespace(remove_by_regex=lambda *_, **__: over.wait(60) and 0)
        with pytest.raises(PoolDown, match="did not answer within 0 s"):
            await admin.retire("^x")
        over.set()
        del admin._page
        admin._pages = "http://127.0.0.1:9"
        monkeypatch.setattr(module, "CALL_S", 10.0)
        with pytest.raises(PoolDown, match=r"the pool's master does not answer: .*refused"):
            await admin.keys()

    play(story)
