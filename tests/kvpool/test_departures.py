"""Laws of stores that leave: all that can move does, the last one stays, and whatever is lost is counted."""

import asyncio
from types import SimpleNamespace

import pytest
from virtual_story import play_in

from tailrace.kvpool import departures
from tailrace.kvpool.departures import Departures
from tailrace.kvpool.status import PoolDown
from tailrace.lab.fuzz.virtual_time import VirtualLoop


class Pool:
    """Segments with keys in memory, by the admin client's interface. `stuck`: keys that never move."""

    def __init__(self, **segments: set[str]):
        self.places = {name: set(keys) for name, keys in segments.items()}
        self.stuck: set[str] = set()
        self.down = False

    def up(self) -> "Pool":
        if self.down:
            raise PoolDown("away")
        return self

    async def keys_at(self, segment: str) -> dict[str, int]:
        return dict.fromkeys(self.places.get(segment, ()), 100)

    async def segments(self) -> dict[str, str]:
        return dict.fromkeys(self.places, "address")

    async def move(self, keys: list[str], segment: str) -> list[str]:
        for key in set(keys) - self.stuck:
            for place in self.places.values():
                place.discard(key)
            self.places[segment].add(key)
        return keys


def play(story, monkeypatch) -> None:
    """In virtual time: a stall of the machine is none of a move's."""
    loop = VirtualLoop()
    monkeypatch.setattr(departures, "time", SimpleNamespace(monotonic=loop.time))
    play_in(loop, story)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(departures, "LOOK_S", 0.005)
    monkeypatch.setattr(departures, "HAND_OVER_S", 0.1)


async def until_gone(leaving: Departures, *segments: str) -> None:
    left = set(segments)
    while left:
        left = {segment for segment in left if not leaving.see(segment, leaving=True)}
        await asyncio.sleep(0.005)


def test_all_keys_are_elsewhere_before_a_store_ends(monkeypatch):
    async def work():
        pool = Pool(a={"1", "2", "3"}, b={"4"}, c=set())
        leaving = Departures(pool.up)
        await asyncio.wait_for(until_gone(leaving, "a"), 10)
        assert pool.places["a"] == set() and pool.places["b"] | pool.places["c"] == {"1", "2", "3", "4"}
        assert (leaving.counts["handed_keys"], leaving.counts["handed_bytes"]) == (3, 300)
        assert (leaving.counts["left_stores"], leaving.counts["lost_keys"]) == (1, 0)

    play(work, monkeypatch)


def test_a_key_that_cannot_move_holds_nothing_up_and_is_counted(monkeypatch):
    async def work():
        pool = Pool(a={"1", "2"}, b=set())
        pool.stuck = {"2"}
        leaving = Departures(pool.up)
        await asyncio.wait_for(until_gone(leaving, "a"), 10)
        assert (leaving.counts["handed_keys"], leaving.counts["lost_keys"]) == (1, 1)

    play(work, monkeypatch)


def test_the_last_store_stays_while_it_has_a_key(monkeypatch):
    async def work():
        pool = Pool(a={"1"}, b={"2"})
        leaving = Departures(pool.up)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(until_gone(leaving, "a", "b"), 0.4)
        assert pool.places == {"a": set(), "b": {"1", "2"}}, "of two that leave, one has all"
        pool.places["b"].clear()
        await asyncio.wait_for(until_gone(leaving, "b"), 10)

    play(work, monkeypatch)


def test_a_store_whose_engines_are_back_stays(monkeypatch):
    async def work():
        pool = Pool(a={"1"}, b=set())
        pool.stuck = {"1"}
        leaving = Departures(pool.up)
        assert not leaving.see("a", leaving=True)
        await asyncio.sleep(0.02)
        assert not leaving.see("a", leaving=False)
        await asyncio.sleep(0.3)
        assert not leaving.see("a", leaving=True), "it begins again"
        assert not leaving.counts["left_stores"]
        await leaving.stop()

    play(work, monkeypatch)


def test_a_master_that_is_away_is_asked_again(monkeypatch):
    async def work():
        pool = Pool(a={"1"}, b=set())
        pool.down = True
        leaving = Departures(pool.up)
        assert not leaving.see("a", leaving=True)
        await asyncio.sleep(0.2)
        pool.down = False
        await asyncio.wait_for(until_gone(leaving, "a"), 10)
        assert pool.places["b"] == {"1"}

    play(work, monkeypatch)


def test_an_odd_answer_of_the_master_ends_no_departure(monkeypatch):
    async def work():
        pool = Pool(a={"1"}, b=set())
        real, answers = pool.segments, iter(["odd"])

        async def segments():
            return {}[odd] if (odd := next(answers, None)) else await real()

        pool.segments = segments
        leaving = Departures(pool.up)
        await asyncio.wait_for(until_gone(leaving, "a"), 10)
        assert pool.places["b"] == {"1"} and next(answers, None) is None

    play(work, monkeypatch)


def test_a_store_that_comes_back_and_leaves_again_is_counted_again(monkeypatch):
    async def work():
        pool = Pool(a={"1"}, b=set(), c=set())
        leaving = Departures(pool.up)
        await asyncio.wait_for(until_gone(leaving, "a"), 10)
        del pool.places["a"]  # its process has ended
        await asyncio.wait_for(until_gone(leaving, "b"), 10)
        pool.places["a"] = {"2"}  # a new one, under the same name
        await asyncio.wait_for(until_gone(leaving, "a"), 10)
        assert leaving.counts["left_stores"] == 3 and pool.places["c"] == {"1", "2"}

    play(work, monkeypatch)


def test_keys_are_shared_out_to_the_stores_that_stay_and_asked_for_once(monkeypatch):
    monkeypatch.setattr(departures, "HAND_OVER_S", 1000.0)

    async def work():
        pool, asked = Pool(a={"1", "2", "3", "4", "5"}, b=set(), c=set(), d={"6"}), []
        pool.stuck = {"1", "2", "3", "4", "5"}

        async def move(keys, segment):
            asked.append((segment, keys))
            return keys

        pool.move = move
        leaving = Departures(pool.up)
        leaving.see("d", leaving=True)
        leaving.see("a", leaving=True)
        await asyncio.sleep(0.05)
        await leaving.stop()
        of_a = [(segment, keys) for segment, keys in asked if keys and "6" not in keys]
        assert sorted(len(keys) for _, keys in of_a) == [2, 3] and {segment for segment, _ in of_a} == {"b", "c"}
        assert sorted(key for _, keys in of_a for key in keys) == ["1", "2", "3", "4", "5"]

    play(work, monkeypatch)


def test_keys_whose_move_failed_or_did_not_begin_are_asked_for_again(monkeypatch):
    async def work():
        pool, failures = Pool(a={"1", "2", "3"}, b=set(), c=set()), iter(["down", "refused", "refused"])
        real = pool.move

        async def move(keys, segment):
            failure = next(failures, None)
            if failure == "down":
                raise PoolDown("away")
            return [] if failure else await real(keys, segment)

        pool.move = move
        leaving = Departures(pool.up)
        await asyncio.wait_for(until_gone(leaving, "a"), 10)
        assert pool.places["b"] | pool.places["c"] == {"1", "2", "3"} and next(failures, None) is None
        assert (leaving.counts["handed_keys"], leaving.counts["lost_keys"]) == (3, 0)

    play(work, monkeypatch)


def test_an_ended_store_may_end_however_often_it_asks_and_counts_once(monkeypatch):
    async def work():
        pool = Pool(a={"1"}, b=set())
        leaving = Departures(pool.up)
        await asyncio.wait_for(until_gone(leaving, "a"), 10)
        assert leaving.see("a", leaving=True) and leaving.see("a", leaving=True)
        assert leaving.counts["left_stores"] == 1
        assert not leaving.see("a", leaving=False) and not leaving.see("b", leaving=False)

    play(work, monkeypatch)


def test_the_time_for_moves_begins_once_another_store_is_there(monkeypatch):
    monkeypatch.setattr(departures, "HAND_OVER_S", 0.05)

    async def work():
        pool = Pool(a={"1"})
        pool.stuck = {"1"}
        leaving = Departures(pool.up)
        leaving.see("a", leaving=True)
        await asyncio.sleep(0.15)
        assert not leaving.see("a", leaving=True), "it is the last one"
        pool.places["b"] = set()
        await asyncio.wait_for(until_gone(leaving, "a"), 10)
        assert leaving.counts["lost_keys"] == 1 and leaving.counts["hand_over_ms"] >= 50

    play(work, monkeypatch)
