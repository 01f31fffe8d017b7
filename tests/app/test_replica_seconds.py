"""Seconds of engine replicas by the learner's own count."""

import threading

import pytest

from tailrace.app.train.replica_seconds import ReplicaSeconds
from tailrace.deployments.messages.status import ReplicaStatus, ServiceSnapshot


class Service:
    """`up`: replicas that answer, with the microseconds of their steps."""

    def __init__(self, **up):
        self.up = up

    def status_blocking(self):
        replicas = [
            ReplicaStatus(
                replica_id=name, ready=True, running=0, max_running=4, kv_used_share=0.0, weights_version=0,
                preemptions=0, work={"step_us": micros},
            )
            for name, micros in self.up.items()
        ]  # fmt: skip
        return ServiceSnapshot(
            waiting=0, running=0, batches=(), replicas=replicas, observed_s=0.0, waits_for=None, policies={}
        )


@pytest.fixture
def seconds():
    found = ReplicaSeconds(Service(a=1_000_000, b=0))
    found.close()  # the test looks by itself
    yield found


def look(seconds, now, **up):
    seconds._count(Service(**up).status_blocking().replicas, now)


def test_idle_is_up_without_busy_and_given_back_is_missing(seconds):
    at = seconds._at
    look(seconds, at + 10, a=5_000_000, b=2_000_000)
    look(seconds, at + 20, a=13_000_000)
    look(seconds, at + 30, a=14_000_000, c=0)
    up, busy, given_back = seconds._sums
    assert (up, busy, given_back) == (10 * 2 + 10 * 1 + 10 * 2, 4 + 2 + 8 + 1, 10)
    assert (seconds.most, seconds.given_back) == (2, 0)


def test_a_replica_that_starts_anew_counts_from_its_start(seconds):
    at = seconds._at
    look(seconds, at + 10, a=0, b=0)
    look(seconds, at + 20, a=3_000_000, b=0)
    assert seconds._sums[1] == 3


def test_busy_seconds_of_readings_that_overlap_count_once(seconds):
    begun, overtaken = threading.Event(), threading.Event()
    old, new = (Service(a=micros, b=0).status_blocking() for micros in (2_000_000, 5_000_000))

    def late():
        seconds._client.status_blocking = lambda: new
        begun.set()
        overtaken.wait(0.1)
        return old

    seconds._client.status_blocking = late
    thread = threading.Thread(target=seconds._look)
    thread.start()
    begun.wait()
    seconds._look()
    overtaken.set()
    thread.join()
    seconds._look()
    assert seconds._sums[1] == 4
