"""The queue of waiting samples: keys that grow are found when their sample is about to be taken, others are kept."""

from types import SimpleNamespace

import pytest

from tailrace.policies.core.fit_queue import MAX_NEED_TOKENS
from tailrace.policies.core.wait_queue import WaitQueue
from tailrace.policies.families.ordering import OracleLongestFirst
from tailrace.policies.protocol.events import IllegalEvent

ONE_QUEUE = SimpleNamespace(apart=False)


class BookOrdering:
    """Keys by a book that a test changes."""

    lanes = 1

    def __init__(self, *growing: int):
        self.growing_lanes = growing
        self.key = {}

    def keys(self, sample, group):
        return [(self.key[sample.sample_id],)]

    def lane(self, picks):
        return 0


def sample(index: int, home: str | None = None, need_tokens: int = 10):
    view = SimpleNamespace(sample_id=f"s{index}", arrival=0, index=index)
    group = SimpleNamespace(view=SimpleNamespace, batch=None, arrival=0)
    one = SimpleNamespace(sample_id=f"s{index}", home=home, place=home, kept_version=None, group=group, index=index)
    one.need_tokens, one.view = need_tokens, lambda: view
    return one


def queue_of(ordering: BookOrdering, *samples) -> WaitQueue:
    queue = WaitQueue(ordering, ONE_QUEUE)
    for place, one in enumerate(samples):
        ordering.key.setdefault(one.sample_id, place)
        queue.put(one, one.view())
    return queue


def taken(queue: WaitQueue, home: str | None = None, room_tokens: int = MAX_NEED_TOKENS) -> list[str]:
    found = []
    while (one := queue.take_first(home, room_tokens)) is not None:
        found.append(one.sample_id)
    return found


def test_a_key_that_has_grown_is_found_when_its_sample_is_about_to_be_taken():
    ordering = BookOrdering(0)
    queue = queue_of(ordering, *(sample(index) for index in range(3)))
    ordering.key["s0"] = 1.5
    assert taken(queue) == ["s1", "s0", "s2"]


def test_keys_of_a_lane_that_does_not_grow_are_kept_until_they_are_renewed():
    ordering = BookOrdering()
    samples = [sample(index) for index in range(3)]
    queue = queue_of(ordering, *samples)
    ordering.key["s0"] = 1.5
    assert [one.sample_id for one in queue.next_up(None, 3)] == ["s0", "s1", "s2"]
    ordering.key["s1"] = 9
    queue.renew(samples[0].group, samples[1:])
    assert taken(queue) == ["s0", "s2", "s1"]


def test_looking_at_those_that_are_next_takes_none_out():
    queue = queue_of(BookOrdering(0), *(sample(index) for index in range(4)))
    assert [one.sample_id for one in queue.next_up(None, 2)] == ["s0", "s1"]
    assert [one.sample_id for one in queue.next_up(None, 9)] == ["s0", "s1", "s2", "s3"]
    assert len(queue) == 4 and taken(queue) == ["s0", "s1", "s2", "s3"]


def test_a_sample_that_does_not_fit_is_passed_over_and_without_room_none_is_taken():
    queue = queue_of(BookOrdering(), sample(0, need_tokens=6400), sample(1, need_tokens=64))
    assert taken(queue, room_tokens=0) == []
    assert taken(queue, room_tokens=640) == ["s1"]
    assert len(queue) == 1


def test_bound_samples_are_those_of_their_home_alone_and_go_with_it():
    queue = queue_of(BookOrdering(), sample(0, "a"), sample(1, "b"), sample(2, "a"), sample(3))
    assert queue.homes() == ["a", "b"] and queue.homes() == []
    queue.look_at("b")
    queue.look_at(None)
    queue.look_at("nowhere")
    assert queue.homes() == ["b"]
    assert [one.sample_id for one in queue.evict("a")] == ["s0", "s2"] and queue.evict("a") == []
    assert taken(queue, "a") == [] and taken(queue, "b") == ["s1"] and taken(queue) == ["s3"]
    assert len(queue) == 0


def test_true_lengths_are_forgotten_with_their_group():
    queue = WaitQueue(OracleLongestFirst(), ONE_QUEUE)
    with pytest.raises(IllegalEvent, match=r"s0: .* needs true lengths, has none"):
        queue.check_new(["s0"])
    queue.reveal({"s0": 9})
    queue.check_new(["s0"])
    queue.forget(SimpleNamespace(samples=[sample(0)]))
    with pytest.raises(IllegalEvent, match="needs true lengths"):
        queue.check_new(["s0"])
    with pytest.raises(IllegalEvent, match="must not see true lengths"):
        WaitQueue(BookOrdering(), ONE_QUEUE).reveal({"s0": 9})
