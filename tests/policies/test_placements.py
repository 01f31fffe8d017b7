"""Placements and chunkings: what each one means, and the contract every one keeps, the user's own included."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from performances import performance
from rollout_machine import play
from user_policies import Halving, HighestId, LastComeFirst

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.families.chunking import Chunking, FixedChunks
from tailrace.policies.families.placement import CostAware, FirstFit, LeastKv, Pinned, Placement, RoundRobin
from tailrace.policies.families.registry import Policies, members
from tailrace.policies.protocol.events import ReplicaJoined, ReplicaMeasured
from tailrace.policies.protocol.views import SampleView

PROFILE = settings(max_examples=60, derandomize=True, deadline=None, database=None)
PLACEMENTS = [*(cls() for cls in members("placement").values()), LeastKv(stay_tokens=100), HighestId()]
PLACEMENTS += [CostAware(min_gain_s=0.0), CostAware(pull_from_tokens=0)]
CHUNKINGS = [FixedChunks(), FixedChunks(chunk_tokens=1), FixedChunks(chunk_tokens=None), Halving()]


def sample(last_replica: str | None = None, generated=0, max_tokens=100, stored=0) -> SampleView:
    return SampleView("g#0", "g", 0, 0, 10, generated, 0, 0.0, max_tokens, 0, last_replica, stored)


def board_of(**blocks) -> ReplicaTable:
    """Replicas of so many free blocks of 16 tokens."""
    board = ReplicaTable()
    for replica_id, free in blocks.items():
        board.join(ReplicaJoined(0.0, replica_id, 16, free, 4, 0, 0))
    return board


def measured(
    board: ReplicaTable, replica_id: str, prefill=1_000.0, fetch=10_000.0, base=0.1, step=0.02, chunk=0.01, **others
) -> ReplicaTable:
    board.measure(ReplicaMeasured(0.0, replica_id, performance(prefill, fetch, base, step, chunk, **others)))
    return board


@PROFILE
@given(
    blocks=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    needs=st.lists(st.integers(11, 300), min_size=1, max_size=12),
    last=st.integers(0, 7),
    speeds=st.lists(st.sampled_from((0.0, 100.0, 5_000.0)), max_size=6),
)
def test_the_replica_chosen_has_room_and_memory_is_a_value(blocks, needs, last, speeds):
    for placement in PLACEMENTS:
        _chooses_among_those_with_room(placement, blocks, needs, last, speeds)


def _chooses_among_those_with_room(placement, blocks, needs, last, speeds):
    assert isinstance(placement, Placement)
    board, memory = board_of(**{f"r{n}": free for n, free in enumerate(blocks)}), None
    for number, fetch in enumerate(speeds[: len(blocks)]):
        measured(board, f"r{number}", fetch=fetch)
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


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize("fetch", [0.0, 10.0, 1_000.0, 1_000.1, 1e9])
def test_from_how_much_on_to_pull_is_a_count_or_never_also_before_anything_is_measured(placement, fetch):
    for known in (
        None,
        performance(1_000.0, fetch, 0.1),
        performance(1_000.0, fetch, 0.0),
        performance(0.0, fetch, 0.0),
    ):
        pull = placement.min_pull_tokens(known, 3)
        assert pull is None or (isinstance(pull, int) and pull >= 0)


@PROFILE
@given(max_tokens=st.integers(1, 20_000), generated=st.integers(0, 19_999))
def test_a_chunk_has_a_token_at_least_and_never_more_than_is_left(max_tokens, generated):
    generated %= max_tokens
    for chunking in CHUNKINGS:
        assert isinstance(chunking, Chunking)
        assert 1 <= chunking.tokens(sample(None, generated, max_tokens)) <= max_tokens - generated, chunking


@PROFILE
@given(data=st.binary(min_size=60, max_size=400))
def test_the_users_own_policies_roll_out_like_the_built_in_ones(data):
    policies = Policies(
        ordering={"type": "user_policies:LastComeFirst", "args": {"spread": 2}},
        placement="user_policies:HighestId",
        chunking="user_policies:Halving",
        kv_on_update="user_policies:KeepYoung",
        prefetch="user_policies:HalfTheQueue",
    )
    assert isinstance(policies.ordering, LastComeFirst)
    played = play(policies, data)
    assert played.core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}
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


def test_first_fit_fills_replicas_in_turn_and_then_takes_the_roomiest():
    board, order = board_of(b=20, a=20, c=30), []
    for number in range(7):
        chosen, _ = FirstFit(chunks=2).choose(sample(), 32, board.read_only, None)
        board.reserve(chosen, f"c{number}", 32)
        order.append(chosen)
    assert order == ["a", "a", "b", "b", "c", "c", "c"], "and the last one where there is most room"


def test_pinned_places_like_least_kv_and_says_that_it_sticks():
    assert Pinned().choose(sample(), 10, board_of(a=5, b=7), None) == ("b", None)
    assert Pinned.sticky and not LeastKv.sticky and not RoundRobin.sticky


@pytest.mark.parametrize(
    ("prefill", "fetch", "base", "pull"),
    [
        (1_000.0, 2_000.0, 0.1, 201),  # 0.1 s + 0.1 s = 0.2 s at 200: from 201 on it wins
        (1_000.0, 2_000.0, 0.0, 1),
        (1_000.0, 1_000.0, 0.0, None),
        (1_000.0, 500.0, 0.0, None),
        (1_000.0, 0.0, 0.0, None),
    ],
)
def test_to_pull_pays_from_the_break_even_of_the_measured_speeds_on(prefill, fetch, base, pull):
    assert CostAware().min_pull_tokens(performance(prefill, fetch, base), 1) == pull
    assert CostAware(pull_from_tokens=7).min_pull_tokens(performance(prefill, fetch, base), 1) == 7


def test_pulls_that_were_slow_are_tried_again_after_a_minute():
    slow = performance(1_000.0, 500.0, 0.1)
    assert CostAware().min_pull_tokens(replace(slow, fetch_age_s=59.0), 1) is None
    assert CostAware().min_pull_tokens(replace(slow, fetch_age_s=61.0), 1) == 1


@PROFILE
@given(st.integers(1, 5_000), st.integers(1, 50_000), st.integers(0, 1_000), st.integers(1, 64))
def test_the_break_even_is_where_fetching_begins_to_cost_less_than_all_that_wait_for_what_is_computed(
    prefill, fetch, base_ms, running
):
    pull = CostAware().min_pull_tokens(performance(prefill, fetch, base_ms / 1_000), running)
    gain_us = [
        1e6 * (running * n / prefill - n / fetch - base_ms / 1_000) for n in ((pull or 1) - 2, pull or 1_000_000)
    ]
    assert gain_us[0] < 1e-3 if pull else gain_us[1] <= 0
    assert pull is None or gain_us[1] > -1e-3


def cost_aware(here: dict, there: dict, context=500, stored=0, new_tokens=100, running=0, **knobs) -> str:
    """Where a sample goes that ran on `a`; `b` has more room. `running` other chunks run on `b`."""
    board = board_of(a=100, b=200)
    for replica_id, speeds in (("a", here), ("b", there)):
        measured(board, replica_id, **speeds)
    for number in range(running):
        board.reserve("b", f"c{number}", 16)
    view = sample("a", generated=context - 10, max_tokens=10_000, stored=stored)
    return CostAware(**knobs).choose(view, context + new_tokens, board, None)[0]


def test_cost_aware_moves_where_the_chunk_is_done_sooner_with_its_kv_reckoned():
    """100 tokens: 3 s here; there 2 s, and 0.5 s to compute 500 tokens, or 0.1 s + 0.05 s to fetch them."""
    slow, fast = {"step": 0.02}, {"step": 0.01}
    assert cost_aware(slow, fast, min_gain_s=0.49) == "b"
    assert cost_aware(slow, fast, min_gain_s=0.51) == "a"
    assert cost_aware(slow, fast, min_gain_s=0.51, stored=500) == "b"
    assert cost_aware(slow, fast, min_gain_s=0.86, stored=500) == "a"
    assert cost_aware(slow, fast, min_gain_s=0.51, stored=500, pull_from_tokens=501) == "a", "it would not look"
    assert cost_aware(slow, fast, running=1) == "a", "0.01 s a token more: the gain is gone"


def test_cost_aware_stays_on_a_tie_and_computes_where_fetching_is_slower():
    same = {"step": 0.02, "chunk": 0.0}
    assert cost_aware(same, same, context=10, new_tokens=0, min_gain_s=0.0, stored=0) == "a"
    free = {"prefill": 1e15}
    assert cost_aware(free, free, min_gain_s=0.0) == "a"
    slow_fetch = {"step": 0.01, "fetch": 100.0}
    assert cost_aware({"step": 0.02}, slow_fetch, stored=500, min_gain_s=0.49) == "b"
    assert cost_aware({"step": 0.02}, slow_fetch, stored=500, pull_from_tokens=1) == "a", "it would pull for 5 s"


def test_cost_aware_leaves_a_replica_without_room_and_starts_where_there_is_most():
    board = measured(measured(board_of(a=5, b=20), "a"), "b")
    assert CostAware().choose(sample("a"), 81, board, None)[0] == "b"
    assert CostAware().choose(sample("gone"), 20, board, None)[0] == "b"
    assert CostAware().choose(sample(None), 20, board, None)[0] == "b"


def test_cost_aware_without_measurements_stays_while_room_here_is_half_of_the_room_there():
    for blocks, chosen in ((10, "a"), (9, "b")):
        for half in (board_of(a=blocks, b=20), measured(board_of(a=blocks, b=20), "b")):
            assert CostAware().choose(sample("a"), 20, half, None)[0] == chosen


def test_cost_aware_knows_that_a_step_brings_several_tokens():
    """100 tokens are 25 steps of drafts: 0.75 s here, 0.5 s there, and the KV costs 0.1 + 0.05 s to fetch."""
    slow, fast = {"step": 0.02, "made": 4.0}, {"step": 0.01, "made": 4.0}
    assert cost_aware(slow, fast, stored=500, min_gain_s=0.09) == "b"
    assert cost_aware(slow, fast, stored=500, min_gain_s=0.11) == "a"
    assert cost_aware(slow, {"step": 0.01, "made": 1.0}, stored=500, min_gain_s=0.0) == "a", "it drafts in vain there"


def test_cost_aware_moves_by_room_to_a_replica_that_has_computed_no_prompt():
    """Else a move would look free."""
    board = measured(measured(board_of(a=10, b=20), "a"), "b", prefill=0.0, step=0.001)
    assert CostAware().choose(sample("a"), 20, board, None)[0] == "a"


def test_fixed_is_the_lesser_of_the_chunk_and_what_is_left():
    assert FixedChunks(chunk_tokens=30).tokens(sample(generated=0)) == 30
    assert FixedChunks(chunk_tokens=30).tokens(sample(generated=80)) == 20
    assert FixedChunks(chunk_tokens=None).tokens(sample(generated=80)) == 20
