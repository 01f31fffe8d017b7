"""Calls of the store are cut into parts that Mooncake's transport can take."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tailrace.kvpool.store import MAX_PIECES, parts


@given(st.lists(st.integers(1, 2 * MAX_PIECES), max_size=40))
def test_every_key_is_in_one_part_in_order_and_no_part_could_take_more(counts):
    sizes = [[1] * count for count in counts]
    cut = [sizes[part] for part in parts(sizes)]
    assert [key for part in cut for key in part] == sizes
    assert all(len(part) == 1 or sum(map(len, part)) + len(part) <= MAX_PIECES for part in cut if part)
    assert all(sum(map(len, part)) + len(part) + len(after[0]) + 1 > MAX_PIECES for part, after in pairwise(cut))
