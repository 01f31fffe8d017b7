"""Placements and chunkings: what each one means, and the contract every one keeps, the user's own included."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_machine import play
from user_policies import Halving, HighestId, LastComeFirst

from policies.board import Board
from policies.bundle import Policies, members
from policies.chunking import Chunking, Fixed
from policies.events import ReplicaJoined
from policies.placement import LeastKv, Pinned, Placement, RoundRobin
from policies.views import SampleView

PROFILE = settings(max_examples=60, derandomize=True, deadline=None, database=None)
PLACEMENTS = [*(cls() for cls in members("placement").values()), LeastKv(stay_tokens=100), HighestId()]
CHUNKINGS = [Fixed(), Fixed(chunk_tokens=1), Fixed(chunk_tokens=None), Halving()]


def sample(last_replica: str | None = None, generated=0, max_tokens=100) -> SampleView:
    return SampleView("g#0", "g", 0, 0, 10, generated, 0, 0.0, max_tokens, 0, last_replica)


def board_of(**blocks) -> Board:
    """Replicas of so many free blocks of 16 tokens."""
    board = Board()
    for replica_id, free in blocks.items():
        board.join(ReplicaJoined(0.0, replica_id, 16, free, 4, 0, 0))
    return board


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@PROFILE
@given(
    blocks=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    needs=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    last=st.integers(0, 7),
)
def test_the_replica_chosen_has_room_and_memory_is_a_value(placement, blocks, needs, last):
    assert isinstance(placement, Placement)
    board, memory = board_of(**{f"r{n}": free for n, free in enumerate(blocks)}), None
    for number, need in enumerate(needs):
        if not any(board.room_tokens(view.replica_id) >= need for view in board.views()):
            continue
        before = board.views()
        chosen, after = placement.choose(sample(f"r{last}"), need, board, memory)
        assert board.room_tokens(chosen) >= need
        assert placement.choose(sample(f"r{last}"), need, board, memory) == (chosen, after), "it only reads"
        assert board.views() == before
        board.reserve(chosen, f"c{number}", need)
        memory = after


@pytest.mark.parametrize("chunking", CHUNKINGS, ids=repr)
@PROFILE
@given(max_tokens=st.integers(1, 20_000), generated=st.integers(0, 19_999))
def test_a_chunk_has_a_token_at_least_and_never_more_than_is_left(chunking, max_tokens, generated):
    assert isinstance(chunking, Chunking)
    generated %= max_tokens
    assert 1 <= chunking.tokens(sample(None, generated, max_tokens)) <= max_tokens - generated


@PROFILE
@given(data=st.binary(min_size=60, max_size=400))
def test_the_users_own_policies_roll_out_like_the_built_in_ones(data):
    policies = Policies(
        ordering={"type": "user_policies:LastComeFirst", "args": {"spread": 2}},
        placement="user_policies:HighestId",
        chunking="user_policies:Halving",
    )
    assert isinstance(policies.ordering, LastComeFirst)
    played = play(policies, data)
    assert played.core.counts() == {"waiting": 0, "running": 0, "batches": 0}
    assert not (played.starved or played.changed or played.stale)


def test_least_kv_takes_the_roomiest_and_the_lowest_id_of_equals():
    assert LeastKv().choose(sample("a"), 10, board_of(a=5, b=7, c=7), None)[0] == "b"


def test_stay_tokens_is_what_a_move_must_gain():
    board = board_of(a=10, b=20)  # b has 160 tokens more
    assert LeastKv(stay_tokens=160).choose(sample("a"), 10, board, None)[0] == "b"
    assert LeastKv(stay_tokens=161).choose(sample("a"), 10, board, None)[0] == "a"
    assert LeastKv(stay_tokens=161).choose(sample("a"), 161, board, None)[0] == "b", "no room where it was"
    assert LeastKv(stay_tokens=161).choose(sample("gone"), 10, board, None)[0] == "b"


def test_round_robin_goes_round_and_skips_the_full():
    board, memory, order = board_of(a=9, b=1, c=9), None, []
    for _ in range(4):
        chosen, memory = RoundRobin().choose(sample(), 32, board, memory)
        order.append(chosen)
    assert order == ["a", "c", "a", "c"]
    assert RoundRobin().choose(sample(), 32, board, "b")[0] == "c", "from behind the last, gone or not"


def test_pinned_places_like_least_kv_and_says_that_it_sticks():
    assert Pinned().choose(sample(), 10, board_of(a=5, b=7), None) == ("b", None)
    assert Pinned.sticky and not LeastKv.sticky and not RoundRobin.sticky


def test_fixed_is_the_lesser_of_the_chunk_and_what_is_left():
    assert Fixed(chunk_tokens=30).tokens(sample(generated=0)) == 30
    assert Fixed(chunk_tokens=30).tokens(sample(generated=80)) == 20
    assert Fixed(chunk_tokens=None).tokens(sample(generated=80)) == 20
