"""The clocks of `bench fleet`, and a few modelled engines over real sockets; no Ray is started."""

import time

import pytest

pytestmark = pytest.mark.long


def test_a_delay_counts_the_loops_own_time_alone_on_its_clock():
    from tailrace.lab.benchmarks.control_plane.fleet_coordinator import Delays

    delays, ended_s = Delays(), time.monotonic()
    delays.note()
    time.sleep(0.05)
    delays.add(ended_s)
    assert delays.seconds()[0] >= 0.05 > delays.own_s()[0] >= 0.0


def test_a_few_engines_keep_pace_with_a_coordinator():
    from tailrace.lab.benchmarks.control_plane.fleet import measure

    size = {"running": 4, "seconds": 5.0, "speed": 20.0, "past": False, "profile": None}
    found = measure((4,), **size, say=lambda text: None)
    size = found["sizes"][4]
    assert size["problems"] == [] and size["chunks_per_s"] > 0 and size["reports_per_s"] > 1
    assert size["core_share"] > 0 and 0 <= size["delay_p50_ms"] <= size["delay_p99_ms"]


def test_observers_are_measured_in_windows_with_all_of_them_and_without():
    from tailrace.lab.benchmarks.control_plane.fleet import one
    from tailrace.lab.benchmarks.control_plane.fleet_coordinator import Fleet
    from tailrace.lab.benchmarks.observability.tracing_cost import collector

    with collector():
        fleet = Fleet(4, running=4, seconds=1.0, speed=20.0, past=False, observed_pairs=1, every_group=True)
        found = one(fleet, say=lambda text: None)
    cost = found["observed"]
    assert found["problems"] == [] and cost["windows"] == 2 and cost["chunk_ends"] > 0
    assert all(share > 0 for share in cost["of_loop"].values()) and cost["of_core"]["all"] < 1
    assert cost["read_ms"] > 0 and cost["board_looks_per_s"] > 0 and cost["board_bytes_per_s"] > 0
