"""What is made of the times of calls, and the parts of `bench control` that need neither Ray nor Mooncake."""

import asyncio
import mmap
import os

import pytest

from tailrace.app.cli import run
from tailrace.lab.benchmarks.control_plane import control_line, control_socket
from tailrace.lab.benchmarks.control_plane.control import result_token
from tailrace.lab.benchmarks.control_plane.control_pool import ObservedProcess
from tailrace.lab.benchmarks.control_plane.rpc_latency import IN_FLIGHT, WARM_UP, cost_of, spread_us
from tailrace.lab.benchmarks.control_plane.stream_cost import APART_S, ITEM_BYTES, cost_of_stream, sent_items


def test_a_spread_is_median_and_99th_percentile_in_microseconds():
    assert spread_us([1e-3] * 99 + [1.0]) == {"median": 1000.0, "p99": pytest.approx(10990.0)}
    assert spread_us([2e-6]) == {"median": 2.0, "p99": 2.0}


def test_calls_are_made_alone_and_then_so_many_at_a_time():
    under_way, seen = 0, []

    async def call() -> None:
        nonlocal under_way
        under_way += 1
        seen.append(under_way)
        await asyncio.sleep(0)
        under_way -= 1

    found = asyncio.run(cost_of(call, 200))
    assert len(seen) == WARM_UP + 400 and set(seen[: WARM_UP + 200]) == {1} and max(seen) == IN_FLIGHT
    assert found["calls_per_s"] > 0 and "callee_us" not in found
    assert found["round_trip_us"]["median"] <= found["round_trip_us"]["p99"]


def test_the_called_processs_time_is_that_of_calls_under_way_together():
    used_s = 0.0

    async def call() -> None:
        nonlocal used_s
        used_s += 2e-3

    async def cpu_s() -> float:
        return used_s

    assert asyncio.run(cost_of(call, 100, cpu_s))["callee_us"] == pytest.approx(2000)


def test_items_of_a_stream_are_read_apart_and_then_in_a_row():
    used_s, asked = 0.0, []

    async def stream(count: int, apart_s: float):
        nonlocal used_s
        asked.append((count, apart_s))
        async for item in sent_items(count, 0.0):
            used_s += 3e-3 if apart_s else 1e-3
            assert len(item[1]) == ITEM_BYTES
            yield item

    async def cpu_s() -> float:
        return used_s

    found = asyncio.run(cost_of_stream(stream, 100, cpu_s))
    assert asked == [(WARM_UP, 0.0), (100, APART_S), (100, 0.0)]
    assert found["callee_us"] == pytest.approx(1000) and found["apart"]["callee_us"] == pytest.approx(3000)
    assert found["items_per_s"] > 0 <= found["delay_us"]["median"] <= found["delay_us"]["p99"]


def test_a_socket_carries_a_kibibyte_there_and_back():
    found = control_socket.measure(100)
    assert 900 < found["message_bytes"] < 1100
    assert 0 < found["round_trip_us"]["median"] <= found["round_trip_us"]["p99"] and found["messages_per_s"] > 0


def test_a_token_of_a_result_has_bytes_for_its_id_and_two_logprobs():
    assert 12 <= result_token()["bytes"] < 13


def test_the_kernel_tells_of_a_process():
    process = ObservedProcess(os.getpid())
    before_s, before_bytes = process.cpu_s, process.resident_bytes
    with mmap.mmap(-1, 64 << 20) as kept:  # of the kernel: an allocator may give what it had freed before
        kept.write(bytes(range(256)) * (len(kept) // 256))
        assert process.resident_bytes >= before_bytes + len(kept) // 2
    while process.cpu_s == before_s:
        pass  # as long as it takes to be seen working
    assert process.cpu_s > before_s


@pytest.mark.parametrize("option", ["--calls", "--keys", "--samples"])
def test_too_few_of_anything_is_refused(capsys, option):
    assert run(["bench", "control", option, "1"]) == 2
    assert option in capsys.readouterr().err


def test_a_chunk_goes_over_a_line_and_both_ends_time_counts():
    found = control_line.measure(70)
    assert found["calls_per_s"] > 0 and found["caller_us"] > 0 and found["callee_us"] > 0
