"""`FitQueue` is a sorted list, only faster."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.policies.core.fit_queue import MAX_NEED_TOKENS, STEP_TOKENS, FitQueue

PROFILE = settings(max_examples=150, derandomize=True, deadline=None, database=None)
NEEDS = st.one_of(st.integers(1, 400), st.integers(1, 20_000), st.sampled_from([63, 64, 65, 4_031, 4_032, 4_033]))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 12), NEEDS, st.integers(0, 5)),
        st.tuples(st.just("remove"), st.integers(0, 12)),
        st.tuples(st.just("peek"), NEEDS),
    ),
    max_size=80,
)


class SortedList:
    """The same, by looking at everything."""

    def __init__(self):
        self.items = {}

    def peek(self, room_tokens: int) -> str | None:
        fits = [(key, item) for item, (need, key) in self.items.items()
                if -(-need // STEP_TOKENS) * STEP_TOKENS <= room_tokens]  # fmt: skip
        return min(fits)[1] if fits else None


@PROFILE
@given(operations=OPERATIONS)
def test_it_answers_like_a_sorted_list(operations):
    queue, model = FitQueue(), SortedList()
    for operation, *args in operations:
        if operation == "push":
            number, need, rank = args
            item, key = f"i{number}", (rank, number)
            queue.push(item, need, key)
            model.items[item] = (need, key)
            assert queue.key(item) == key
        elif operation == "remove" and f"i{args[0]}" in model.items:
            queue.remove(f"i{args[0]}")
            del model.items[f"i{args[0]}"]
        elif operation == "peek":
            assert queue.peek(args[0]) == model.peek(args[0])
    for room in (0, 1, 64, 128, 4_032, 20_032, 10 * MAX_NEED_TOKENS):
        assert queue.peek(room) == model.peek(room)


@PROFILE
@given(needs=st.lists(NEEDS, max_size=30))
def test_taken_one_by_one_it_empties_in_order(needs):
    queue = FitQueue()
    for number, need in enumerate(needs):
        queue.push(f"i{number:02}", need, (need % 7, number))
    taken = []
    while (item := queue.peek(MAX_NEED_TOKENS)) is not None:
        queue.remove(item)
        taken.append(item)
    assert taken == [f"i{n:02}" for _, n in sorted((need % 7, n) for n, need in enumerate(needs))]


def test_what_is_large_never_blocks_what_fits():
    queue = FitQueue()
    queue.push("large", 5_000, (0,))
    queue.push("small", 100, (1,))
    assert (queue.peek(4_999), queue.peek(5_056), queue.peek(127)) == ("small", "large", None)


def test_renewing_items_over_and_over_keeps_the_queue_small():
    """Dead entries are swept: memory follows the items, not the pushes."""
    queue = FitQueue()
    for turn in range(2_000):
        for item in range(4):
            queue.push(f"i{item}", 100, (item, -turn if item == 3 else turn))
    assert sum(map(len, queue._heaps.values())) <= 100
    assert queue.peek(128) == "i0"


def test_a_need_beyond_the_bound_is_refused_and_leaves_the_queue_alone():
    queue = FitQueue()
    queue.push("a", 64, (0,))
    with pytest.raises(ValueError, match="the queue's bound"):
        queue.push("a", MAX_NEED_TOKENS + 1, (0,))
    assert queue.peek(64) == "a"
    queue.push("b", MAX_NEED_TOKENS, (-1,))
    assert (queue.peek(MAX_NEED_TOKENS), queue.peek(MAX_NEED_TOKENS - 1)) == ("b", "a")
