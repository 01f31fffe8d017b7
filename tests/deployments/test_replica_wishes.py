"""Wishes of coordinators in Serve's controller: the newest report counts, and without one nothing changes."""

from dataclasses import dataclass

import pytest

from tailrace.deployments import replica_wishes


@dataclass(frozen=True)
class Point:
    timestamp: float
    value: float


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(replica_wishes, "_by_application", {})


def test_without_a_report_the_present_number_stays():
    assert replica_wishes.wanted("one", "Engine", 3) == 3
    replica_wishes.record("one", {})
    assert replica_wishes.wanted("one", "Engine", 3) == 3
    replica_wishes.record("one", {"Engine": {"r": []}})
    assert replica_wishes.wanted("one", "Engine", 3) == 3


def test_the_newest_report_counts_and_not_a_mean_over_several():
    replica_wishes.record("one", {"Engine": {"r": [Point(1.0, 2.0), Point(3.0, 1.0), Point(2.0, 2.0)]}})
    assert replica_wishes.wanted("one", "Engine", 9) == 1
    replica_wishes.record("one", {"Engine": {"old": [Point(5.0, 2.0)], "new": [Point(6.0, 4.0)]}})
    assert replica_wishes.wanted("one", "Engine", 9) == 4


def test_applications_and_deployments_are_kept_apart():
    replica_wishes.record("one", {"Engine": {"r": [Point(1.0, 2.0)]}, "Drafter": {"r": [Point(1.0, 0.0)]}})
    replica_wishes.record("two", {"Engine": {"r": [Point(1.0, 5.0)]}})
    assert replica_wishes.wanted("one", "Engine", 9) == 2 and replica_wishes.wanted("one", "Drafter", 9) == 0
    assert replica_wishes.wanted("two", "Engine", 9) == 5 and replica_wishes.wanted("two", "Drafter", 9) == 9
    assert replica_wishes.wanted("one", replica_wishes.COORDINATOR, 1) == 1


def test_a_coordinator_that_is_gone_leaves_no_wish():
    replica_wishes.record("one", {"Engine": {"r": [Point(1.0, 2.0)]}})
    replica_wishes.record("one", {})
    assert replica_wishes.wanted("one", "Engine", 9) == 9
